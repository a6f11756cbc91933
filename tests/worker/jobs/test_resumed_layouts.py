"""A checkpoint of one layout, resumed on others: the next step is the run's own. All layouts: `make bench-resume`."""

from __future__ import annotations

import pytest

from tests.worker.actor.test_actor import job
from tests.worker.layouts import LAYOUTS, resumed, trained


@pytest.mark.slow
def test_the_step_behind_a_checkpoint_is_the_same_on_other_stages_meshes_and_workers(tmp_path):
    """Bit for bit between layouts whose workers compute the same rows, else to rounding. Weights that are tied would be
    summed in an order that the plan chooses, where one mesh has both ends."""
    spec = job()
    spec["model"] = {**spec["model"], "args": {**spec["model"]["args"], "tied": False}}
    runs = {name: trained(spec, LAYOUTS[name], f"{tmp_path}/{name}") for name in ("4 on 4", "data 2")}
    found = resumed(spec, LAYOUTS["4 on 2"], runs)
    assert found["4 on 4"].bitwise and found["4 on 4"].changed > 1e-3
    assert 0 < found["data 2"].parameters < 1e-5 and found["data 2"].loss < 1e-6
    unlike = resumed(spec, LAYOUTS["[2, 1]"], runs)
    assert all(one.parameters < 1e-5 < 1e-3 < one.changed and one.loss < 1e-6 for one in unlike.values())
