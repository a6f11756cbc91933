import pytest

from worker.engine import compile as engine_compile


@pytest.fixture
def no_generated_code(monkeypatch):
    """Torch's compiler without its last part: graphs are traced, differentiated and cut as for inductor, then run by
    torch's own kernels. It takes a fraction of the time."""
    monkeypatch.setattr(engine_compile, "BACKEND", "aot_eager")
    monkeypatch.setattr(engine_compile, "missing_compiler", lambda device: None)
