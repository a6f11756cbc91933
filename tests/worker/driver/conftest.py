import sys
from pathlib import Path

# importlib mode gives test modules no package: make the helpers beside them importable.
sys.path.insert(0, str(Path(__file__).parent))
