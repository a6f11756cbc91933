import sys
from pathlib import Path

import pytest

from worker.compiled import compiler

for folder in (Path(__file__).parent, Path(__file__).parents[1], Path(__file__).parents[1] / "verify"):
    sys.path.insert(0, str(folder))


@pytest.fixture
def no_generated_code(monkeypatch):
    """Torch's compiler without its last part: graphs are traced, differentiated and cut as for inductor, then run by
    torch's own kernels. It takes a fraction of the time."""
    monkeypatch.setattr(compiler, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiler, "missing_compiler", lambda device: None)
