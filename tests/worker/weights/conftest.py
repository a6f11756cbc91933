import sys
from pathlib import Path

# importlib mode gives test modules no package: make the helpers beside them, and above, importable.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
