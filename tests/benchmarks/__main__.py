"""`python -m tests.benchmarks`: the benchmarks that need neither root nor a GPU, one after the other."""

import subprocess
import sys
from pathlib import Path

NAMES = ("scheduler", "measured_costs", "overhead")


def main() -> int:
    folder = Path(__file__).parent
    codes = []
    for name in NAMES:
        if (folder / f"{name}.py").exists() or (folder / name).is_dir():
            print(f"\n# {name}\n", flush=True)
            codes.append(subprocess.call([sys.executable, "-m", f"tests.benchmarks.{name}"]))
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
