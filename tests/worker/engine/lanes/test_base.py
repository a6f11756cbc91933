"""The lanes of every device offer the engine the same."""

import inspect

import pytest

from worker.engine.lanes.base import Lanes
from worker.engine.lanes.cpu import CpuLanes
from worker.engine.lanes.cuda import CudaLanes


@pytest.mark.parametrize("lanes", [CpuLanes, CudaLanes])
def test_lanes_have_the_members_of_the_protocol_with_its_signatures_and_no_others(lanes):
    def members(cls):
        return {name: inspect.signature(f) for name, f in vars(cls).items() if not name.startswith("_")}

    def calls(cls):
        return {
            name: [(p.name, p.kind, p.default) for p in signature.parameters.values()]
            for name, signature in members(cls).items()
        }

    assert calls(lanes) == calls(Lanes)
