"""What the control plane's metrics tell of single jobs: counted in both kinds of database."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.api.metrics import exposition
from service.jobs.explain import read_calibrations
from service.jobs.metrics import planned_link_bytes, read_job_metrics, step_seconds
from service.jobs.views import view_in
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import PipelineSpec
from service.spec.job import JobSpec
from service.spec.states import AttemptState, JobState
from service.store import transitions
from service.store.attempts import create_attempt
from service.store.database import Database, utc_now
from service.store.measurements import SlotRecord, record_timeline
from service.store.plans import record_job_plan
from service.store.queues import count_jobs_and_attempts
from service.store.tables import AttemptRow, JobRow
from tests.service.api.pages.seed import MICROBATCHES, SLOWER, job_spec, measured, pipeline
from tests.service.conftest import create_job

NOW = utc_now()


def ago(seconds: float):
    return NOW - timedelta(seconds=seconds)


async def running(database: Database, *, waited_s: float = 0.0, age_s: float = 0.0, **fields) -> AttemptRow:
    """A job that was submitted `age_s` + `waited_s` ago and trains since `age_s`."""
    spec = JobSpec.model_validate({**job_spec("gpt").model_dump(mode="json"), **fields})
    async with database.write() as session:
        job = await create_job(session, spec, at=ago(age_s + waited_s))
        attempt = await create_attempt(session, job, device="cpu", at=ago(age_s))
        transitions.move_attempt(attempt, AttemptState.RUNNING, at=ago(age_s))
        transitions.move_job(session, job, JobState.RUNNING, at=ago(age_s))
        job.step_s = 2.0
    return attempt


async def scraped(database: Database) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by metric, then by the labels' values, in the order of the labels' names."""
    counts = await count_jobs_and_attempts(database, ("default",))
    text = exposition(counts, await read_job_metrics(database, ("default",), at=NOW)).decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(value for _, value in sorted(sample.labels.items()))] = (
                sample.value
            )
    return found


async def test_a_job_is_there_with_its_name_until_it_is_over(database: Database):
    attempt = await running(database)
    found = await scraped(database)
    assert found["slotline_job_info"] == {
        ("1", attempt.job_id, "gpt", "", "default", "default", "RUNNING"): 1
    }, "no owner is known: an empty label is none to Prometheus"
    assert found["slotline_job_attempts"] == {(attempt.job_id,): 1}
    async with database.write() as session:
        job = await session.get(JobRow, attempt.job_id)
        transitions.move_job(session, job, JobState.SUCCEEDED, at=NOW)
    assert "slotline_job_info" not in await scraped(database)


async def test_times_of_the_last_checkpoint_and_of_the_last_interruption_are_told(database: Database):
    attempt = await running(database, age_s=3000)
    found = await scraped(database)
    assert "slotline_checkpoint_timestamp_seconds" not in found
    assert "slotline_attempt_end_timestamp_seconds" not in found
    for number, (reason, age_s) in enumerate([("NODE_LOST", 2000), ("PREEMPTED", 900)], 2):
        async with database.write() as session:
            job = await session.get(JobRow, attempt.job_id)
            last = await session.get(AttemptRow, job.current_attempt)
            told = f"after step {number}: 1 MB"
            transitions.add_event(session, job, "checkpoint", told, at=ago(age_s + 50), attempt=last.number)
            transitions.move_attempt(last, AttemptState.FAILED, reason=reason, at=ago(age_s))
            transitions.move_job(session, job, JobState.RECOVERING, at=ago(age_s))
            await create_attempt(session, job, device="cpu", at=ago(age_s - 5))
    found = await scraped(database)
    assert found["slotline_checkpoint_timestamp_seconds"] == {(job.id,): ago(950).timestamp()}
    assert found["slotline_attempt_end_timestamp_seconds"] == {(job.id, "PREEMPTED"): ago(900).timestamp()}


async def test_the_share_of_time_that_went_into_steps_that_count_is_told_of_metrics_and_view(
    database: Database,
):
    attempt = await running(database, waited_s=500, age_s=1000)
    assert "slotline_job_effective_training_ratio" not in await scraped(database)
    async with database.write() as session:
        job = await session.get(JobRow, attempt.job_id)
        job.trained_s = 400.0
        transitions.move_attempt(attempt, AttemptState.FAILED, reason="NODE_LOST", at=ago(700))
        transitions.move_job(session, job, JobState.RECOVERING, at=ago(700))
        await create_attempt(session, job, device="cpu", at=ago(600))
    share = (await scraped(database))["slotline_job_effective_training_ratio"]
    assert share == {(attempt.job_id,): pytest.approx(0.4)}
    async with database.write() as session:
        job = await session.get(JobRow, attempt.job_id)
        job.finished_at = ago(200)
        assert (await view_in(session, job)).effective_training_ratio == pytest.approx(0.5)


async def lines_of(database: Database) -> int:
    counts = await count_jobs_and_attempts(database, ("default",))
    return exposition(counts, await read_job_metrics(database, ("default",), at=NOW)).count(b"\n")


async def test_jobs_that_wait_for_their_first_attempt_are_counted_and_have_no_series(database: Database):
    await running(database)
    lines = await lines_of(database)
    async with database.write() as session:
        for age_s in range(50):
            await create_job(session, job_spec("waits"), at=ago(age_s))
    assert await lines_of(database) == lines
    found = await scraped(database)
    assert found["slotline_queue_depth"] == {("default",): 50}
    assert found["slotline_queue_oldest_wait_seconds"][("default",)] == pytest.approx(49, abs=0.1)
    assert len(found["slotline_job_info"]) == 1


async def test_of_very_many_jobs_those_that_hold_accelerators_have_series_first(
    database: Database, monkeypatch
):
    monkeypatch.setattr("service.jobs.metrics.MAX_JOB_SERIES", 2)
    runs = [await running(database, age_s=100.0 * age) for age in (3, 2, 1)]
    async with database.write() as session:
        job = await session.get(JobRow, runs[2].job_id)
        transitions.move_job(session, job, JobState.RECOVERING, at=NOW)
    found = await scraped(database)
    assert {labels[1] for labels in found["slotline_job_info"]} == {run.job_id for run in runs[:2]}
    assert found["slotline_jobs_without_series"] == {(): 1}


async def test_the_version_is_told(database: Database):
    ((labels, value),) = (await scraped(database))["slotline_build_info"].items()
    assert value == 1 and all(labels)


async def test_waits_for_the_first_attempt_are_a_histogram(database: Database):
    for waited in (0.5, 30, 30, 200_000):
        await running(database, waited_s=waited)
    found = await scraped(database)
    buckets = {limit: number for (limit, _), number in found["slotline_queue_wait_seconds_bucket"].items()}
    assert (buckets["1"], buckets["15"], buckets["60"], buckets["86400"], buckets["+Inf"]) == (
        1,
        1,
        3,
        3,
        4,
    )
    assert found["slotline_queue_wait_seconds_count"][("default",)] == 4
    assert found["slotline_queue_wait_seconds_sum"][("default",)] == pytest.approx(200_060.5, abs=0.1)


async def test_a_further_attempt_is_no_further_wait(database: Database):
    attempt = await running(database, waited_s=30)
    async with database.write() as session:
        job = await session.get(JobRow, attempt.job_id)
        transitions.move_job(session, job, JobState.RECOVERING, at=NOW)
        await create_attempt(session, job, device="cpu", at=NOW)
    assert (await scraped(database))["slotline_queue_wait_seconds_count"][("default",)] == 1


async def test_a_queue_without_jobs_is_there_and_the_oldest_wait_is_told(database: Database):
    found = await scraped(database)
    assert found["slotline_queue_wait_seconds_count"] == {("default",): 0}
    assert found["slotline_queue_oldest_wait_seconds"] == {("default",): 0}
    async with database.write() as session:
        for seconds in (10, 500, 20):
            await create_job(session, job_spec("patient"), at=ago(seconds))
    found = await scraped(database)
    assert found["slotline_queue_oldest_wait_seconds"][("default",)] == pytest.approx(500, abs=0.01)


async def test_the_age_of_a_checkpoint_counts_from_the_last_one_or_from_the_start(database: Database):
    with_checkpoints = {"checkpoint": {"uri": "/runs/a", "every_steps": 50}}
    attempt = await running(database, age_s=1000, **with_checkpoints)
    await running(database, age_s=1000)  # makes none, so none is missing
    found = await scraped(database)
    assert found["slotline_checkpoint_age_seconds"] == {(attempt.job_id,): pytest.approx(1000, abs=0.01)}
    assert found["slotline_checkpoint_interval_seconds"] == {(attempt.job_id,): 100}
    async with database.write() as session:
        job = await session.get(JobRow, attempt.job_id)
        transitions.add_event(session, job, "checkpoint", "after step 50: /runs/a/50", at=ago(70), attempt=1)
        transitions.add_event(
            session, job, "checkpoint", "cannot be read; trying /runs/a/0", at=ago(5), attempt=1
        )
    found = await scraped(database)
    assert found["slotline_checkpoint_age_seconds"] == {(attempt.job_id,): pytest.approx(70, abs=0.01)}


async def test_a_slow_link_and_a_slow_mesh_stand_beside_their_plan(database: Database):
    attempt = await running(database)
    spec = pipeline()
    plan = make_plan(spec)
    body = json.dumps(
        {"begins": ["a"], "spec": spec.model_dump(mode="json"), "plan": plan.model_dump(mode="json")}
    )
    async with database.write() as session:
        await record_job_plan(session, attempt, body, at=NOW)
    assert "slotline_link_seconds" not in await scraped(database), "no step was profiled yet"
    await profile(database, attempt, 20, measured(plan))
    found = await scraped(database)
    job = attempt.job_id
    assert found["slotline_mesh_compute_seconds_over_plan"] == {
        (job, f"mesh{mesh}"): pytest.approx(SLOWER) for mesh in range(3)
    }
    links = {
        (job, "mesh0", "mesh1"),
        (job, "mesh1", "mesh0"),
        (job, "mesh1", "mesh2"),
        (job, "mesh2", "mesh1"),
    }
    assert found["slotline_link_seconds_over_plan"] == {link: pytest.approx(SLOWER) for link in links}
    assert found["slotline_plan_link_seconds"] == {link: pytest.approx(0.004) for link in links}
    assert "slotline_link_bytes" not in found, "this plan knows seconds of its transfers, and no sizes"

    slow = [
        slot._replace(end_s=slot.end_s + 0.003)
        if {slot.mesh, slot.peer_mesh} == {"mesh1", "mesh2"} and slot.action.endswith("_F")
        else slot
        for slot in measured(plan)
    ]
    await profile(database, attempt, 40, slow)
    ratios = (await scraped(database))["slotline_link_seconds_over_plan"]
    assert ratios.pop((job, "mesh1", "mesh2")) > 3, "the new step, not the one that was kept"
    assert all(ratio == pytest.approx(SLOWER) for ratio in ratios.values())


@pytest.mark.slow
async def test_the_calibrated_makespan_is_that_of_the_last_warm_steps_of_the_planned_attempt(
    database: Database,
):
    attempt = await running(database)
    spec = pipeline()
    plan = make_plan(spec)
    body = json.dumps(
        {"begins": ["a"], "spec": spec.model_dump(mode="json"), "plan": plan.model_dump(mode="json")}
    )

    def stretched(factor: float) -> list[SlotRecord]:
        return [
            slot._replace(start_s=factor * slot.start_s, end_s=factor * slot.end_s) for slot in measured(plan)
        ]

    async def calibrated() -> float | None:
        return (
            (await scraped(database)).get("slotline_calibrated_makespan_seconds", {}).get((attempt.job_id,))
        )

    async with database.write() as session:
        await record_job_plan(session, attempt, body, at=NOW)
    await profile(database, attempt, 20, stretched(9.0))
    assert await calibrated() is None, "the first step of an attempt is cold"
    await profile(database, attempt, 21, stretched(2.0))
    once_s = plan.makespan_s * SLOWER
    assert await calibrated() == pytest.approx(2.0 * once_s)
    for step, factor in enumerate((3.0, 4.0, 4.0, 5.0), 22):
        await profile(database, attempt, step, stretched(factor))
    assert await calibrated() == pytest.approx(4.0 * once_s), "the median of 2, 3, 4, 4 and 5"
    for step in (30, 31):
        await profile(database, attempt, step, stretched(1.0))
    assert await calibrated() == pytest.approx(3.0 * once_s), "the median of 2, 3, 4, 4, 5, 1 and 1"
    await profile(database, attempt, 32, stretched(1.0))
    assert await calibrated() == pytest.approx(1.0 * once_s), "of three steps behind those of the start"
    for step in range(33, 38):
        await profile(database, attempt, step, stretched(2.0))
    assert await calibrated() == pytest.approx(2.0 * once_s), "the median of eight"
    async with database.write() as session:
        await session.merge(attempt)
        later = AttemptRow(**{c.key: getattr(attempt, c.key) for c in AttemptRow.__table__.columns})
        later.id, later.number = f"{attempt.job_id}-2", 2
        session.add(later)
        await session.flush()
        await record_job_plan(session, later, body, at=NOW)
    assert await calibrated() is None, "no step of the new attempt's plan was profiled"


async def test_a_scrape_waits_for_few_calibrations_and_each_job_has_its_turn(database: Database):
    plan = make_plan(pipeline())
    body = json.dumps({"spec": pipeline().model_dump(mode="json"), "plan": plan.model_dump(mode="json")})
    jobs = []
    for _ in range(3):
        attempt = await running(database)
        async with database.write() as session:
            await record_job_plan(session, attempt, body, at=NOW)
        for step in (1, 2):
            await profile(database, attempt, step, measured(plan))
        jobs.append(attempt.job_id)
    for known in (1, 2, 3):
        found = await read_calibrations(database, jobs, limit_s=0.0)
        assert found.keys() == set(jobs[:known])
    assert {calibration.steps for calibration in found.values()} == {1}
    await profile(database, attempt, 3, measured(plan))
    steps = [(await read_calibrations(database, jobs, limit_s=0.0))[jobs[2]].steps for _ in range(3)]
    assert steps == [1, 1, 2], "those that were looked at before it come first"


async def test_what_links_carry_and_how_fast_stands_beside_the_plan(database: Database):
    attempt = await running(database)
    data = pipeline().model_dump(mode="json")
    for place, edge in enumerate(data["edges"]):
        edge |= {"forward_s": None, "backward_s": None}
        edge |= {"forward_bytes": 1000 * (place + 1), "backward_bytes": 500}
    data["network"] = {"contention": "link", "bandwidth_bytes_per_s": 1e6}
    spec = PipelineSpec.model_validate(data)
    plan = make_plan(spec)
    body = json.dumps(
        {"begins": ["a"], "spec": spec.model_dump(mode="json"), "plan": plan.model_dump(mode="json")}
    )
    async with database.write() as session:
        await record_job_plan(session, attempt, body, at=NOW)
    await profile(database, attempt, 20, measured(plan))
    found, job = await scraped(database), attempt.job_id
    carried = {
        ("mesh0", "mesh1"): 1000,
        ("mesh1", "mesh2"): 2000,
        ("mesh1", "mesh0"): 500,
        ("mesh2", "mesh1"): 500,
    }
    expected = {(job, *ends): MICROBATCHES * size for ends, size in carried.items()}
    assert found["slotline_link_bytes"] == expected
    assert found["slotline_plan_link_bandwidth_bytes_per_second"] == {
        link: pytest.approx(1e6) for link in expected
    }
    assert found["slotline_link_bandwidth_bytes_per_second"] == {
        link: pytest.approx(1e6 / SLOWER) for link in expected
    }


def test_a_link_with_a_transfer_of_unknown_size_tells_no_bytes():
    def got(mesh: str, peer: str, edge: int) -> SlotRecord:
        return SlotRecord(mesh, f"recv:{peer}", "RECV_F", "s", "t", peer, edge, 0, 0.0, 1.0)

    edges = [{"forward_bytes": 8}, {"forward_bytes": None}]
    assert planned_link_bytes([got("b", "a", 0), got("c", "a", 1), got("c", "a", 0)], edges) == {
        ("a", "b"): 8
    }


async def test_phases_of_a_start_are_told_of_the_current_attempt(database: Database):
    attempt = await running(database, waited_s=7, age_s=100)
    waited = {(attempt.job_id, "queue"): pytest.approx(7.0)}
    assert await told_phases(database) == waited, "Ray has not been given the driver yet"
    async with database.write() as session:
        kept = await session.get(AttemptRow, attempt.id)
        kept.submitted_at, kept.started_at = ago(98), ago(68)
    assert await told_phases(database) == {
        **waited,
        (attempt.job_id, "submit"): pytest.approx(2.0),
        (attempt.job_id, "start"): pytest.approx(30.0),
    }


async def test_a_job_that_recovers_waits_from_the_end_of_the_attempt_before(database: Database):
    attempt = await running(database, waited_s=7, age_s=100)
    async with database.write() as session:
        job = await session.get(JobRow, attempt.job_id)
        ended = await session.get(AttemptRow, attempt.id)
        transitions.move_attempt(ended, AttemptState.FAILED, at=ago(20))
        transitions.move_job(session, job, JobState.RECOVERING, at=ago(20))
        await create_attempt(session, job, device="cpu", at=ago(5))
    assert await told_phases(database) == {(attempt.job_id, "queue"): pytest.approx(15.0)}


async def told_phases(database: Database) -> dict[tuple[str, ...], float]:
    return (await scraped(database)).get("slotline_job_start_seconds", {})


async def test_a_plan_of_another_attempt_is_not_compared(database: Database):
    attempt = await running(database)
    spec = pipeline()
    plan = make_plan(spec)
    await profile(database, attempt, 20, measured(plan))
    body = json.dumps(
        {"begins": ["a"], "spec": spec.model_dump(mode="json"), "plan": plan.model_dump(mode="json")}
    )
    async with database.write() as session:
        job = await session.get(JobRow, attempt.job_id)
        transitions.move_attempt(await session.get(AttemptRow, attempt.id), AttemptState.FAILED, at=NOW)
        transitions.move_job(session, job, JobState.RECOVERING, at=NOW)
        later = await create_attempt(session, job, device="cpu", at=NOW)
        await record_job_plan(session, later, body, at=NOW)
        transitions.move_job(session, job, JobState.RUNNING, at=NOW)
    assert "slotline_link_seconds" not in await scraped(database)


def test_waiting_for_the_other_end_is_no_transfer():
    def end(mesh: str, lane: str, action: str, start_s: float, end_s: float) -> SlotRecord:
        return SlotRecord(mesh, lane, action, "s", "t", lane.partition(":")[2], 0, 0, start_s, end_s)

    slots = [end("a", "send:b", "SEND_F", 0.0, 5.0), end("b", "recv:a", "RECV_F", 4.0, 5.0)]
    assert step_seconds(slots).links == {("a", "b"): 1.0}
    assert step_seconds(slots[:1]).links == {}, "the other end was not measured"


async def profile(database: Database, attempt: AttemptRow, step: int, slots: list[SlotRecord]) -> None:
    async with database.write() as session:
        await record_timeline(
            session, attempt, step=step, started_at=1.8e9, uncertainty_s=None, slots=slots, keep=9
        )
