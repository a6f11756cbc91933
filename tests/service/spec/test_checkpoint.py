"""The checkpoint section of a job: what does not fit together is refused with the values and the way out."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from service.spec.job import CheckpointSection
from worker.contract.job import Job


@pytest.mark.parametrize(("every", "copy_every"), [(5, 5), (5, 7), (50, 50)])
def test_copies_that_would_never_be_newer_than_a_checkpoint_are_refused(every, copy_every):
    with pytest.raises(ValidationError) as refused:
        CheckpointSection(uri="/runs", every_steps=every, copy_every_steps=copy_every)
    told = str(refused.value)
    assert f"checkpoint.copy_every_steps {copy_every} is not less than every_steps {every}" in told
    assert "set it lower, or leave it out" in told


@pytest.mark.parametrize("copy_every", [0, -1, 1.5, "often"])
def test_an_interval_of_copies_is_a_number_of_steps(copy_every):
    with pytest.raises(ValidationError, match="copy_every_steps"):
        CheckpointSection(uri="/runs", copy_every_steps=copy_every)


def test_workers_read_the_interval_of_copies_as_it_was_given():
    given = CheckpointSection(uri="/runs", copy_every_steps=5).model_dump(mode="json")
    job = {"model": {"factory": "m:f"}, "data": {"factory": "d:f"}, "checkpoint": given}
    assert Job.from_json(job).checkpoint.copy_every_steps == 5
    assert CheckpointSection(uri="/runs").copy_every_steps is None
