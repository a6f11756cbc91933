"""What NVML tells of a GPU: by the real package, whose calls are checked here, over a library that is not there."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from worker.machine.telemetry import GPU_READ_INTERVAL_S, GpuMeter, GpuUsage

UUID = "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"


class FakeNvml:
    """Two GPUs, as nvidia-ml-py answers: its functions' signatures, its own structures and errors."""

    def __init__(self) -> None:
        self.begun, self.asked, self.fails = 0, 0, False

    def nvmlInit(self) -> None:
        self.begun += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        assert self.begun, "NVML was not begun"
        if uuid != UUID:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return SimpleNamespace(uuid=uuid)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        self.asked += 1
        if self.fails:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)  # as for a MIG slice
        return pynvml.c_nvmlUtilization_t(gpu=87, memory=12)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Any = None) -> Any:
        assert version is None and handle.uuid == UUID
        return pynvml.c_nvmlMemory_t(total=80 << 30, free=60 << 30, used=20 << 30)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    made = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_the_fake_has_the_signatures_of_the_package():
    names = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(names) == 4
    for name in names:
        real, fake = inspect.signature(getattr(pynvml, name)), inspect.signature(getattr(FakeNvml(), name))
        assert list(real.parameters) == list(fake.parameters), name
        for parameter in real.parameters:
            assert real.parameters[parameter].default == fake.parameters[parameter].default, name


def test_a_gpu_is_found_by_its_uuid_and_read_now_and_then(nvml: FakeNvml):
    clock = [100.0]
    meter = GpuMeter("cuda", lambda: UUID, lambda: clock[0])
    assert meter.read() == GpuUsage(0.87, 20 << 30, 80 << 30)
    assert meter.read() is None and nvml.asked == 1, "not at each step"
    clock[0] += GPU_READ_INTERVAL_S
    assert meter.read() == GpuUsage(0.87, 20 << 30, 80 << 30)
    assert (nvml.begun, nvml.asked) == (1, 2)


def test_what_nvml_does_not_tell_is_asked_for_once(nvml: FakeNvml):
    clock, nvml.fails = [0.0], True
    meter = GpuMeter("cuda", lambda: UUID, lambda: clock[0])
    for _ in range(3):
        assert meter.read() is None
        clock[0] += GPU_READ_INTERVAL_S
    assert nvml.asked == 1
    assert GpuMeter("cuda", lambda: "GPU-another").read() is None


def test_the_real_package_without_a_driver_tells_nothing_and_fails_nothing(monkeypatch: pytest.MonkeyPatch):
    def missing(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", missing)
    assert GpuMeter("cuda", lambda: UUID).read() is None


def test_neither_a_processor_nor_a_missing_package_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMeter("cpu", lambda: pytest.fail("asked")).read() is None
    assert GpuMeter("cuda", lambda: UUID).read() is None
