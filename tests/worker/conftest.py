import sys
from pathlib import Path

# Jobs of tests name factories in the helpers here (odd_jobs:Vectors) as users name theirs: by top-level modules.
sys.path.insert(0, str(Path(__file__).parent))
