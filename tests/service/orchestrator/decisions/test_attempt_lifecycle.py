"""The orchestrator's decisions: no server, no database, no Ray, no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.orchestrator.decisions.admission_and_preemption import admit
from service.orchestrator.decisions.attempt_lifecycle import (
    Capacity,
    DoNothing,
    EndAttempt,
    FailedAttempt,
    FailJob,
    Holder,
    RayJob,
    RayState,
    Start,
    StopDriver,
    Submit,
    TryAgain,
    Wait,
    WaitingJob,
    WatchedAttempt,
    WatchLimits,
    after_failure,
    decide_attempt,
    without_made_good,
)
from service.spec.job import RetrySection
from service.spec.states import AttemptState
from worker.contract import reasons
from worker.contract.reasons import Reason

FOUR = Capacity({"cpu": 4, "cuda": 0})


def job(name: str, accelerators: int = 4, **changes) -> WaitingJob:
    fields = {"queue": "default", "priority": 0, "queued_at": 0.0, "device": "auto"}
    return WaitingJob(name, accelerators=accelerators, **{**fields, **changes})


def decide(waiting, holders=(), capacity=FOUR, quotas=None, now=100.0):
    return admit(waiting, holders, capacity=capacity, quotas=quotas or {}, now=now)


# Admission


def test_a_gang_that_fits_starts():
    assert decide([job("a")]) == [Start("a", "cpu", 4)]


def test_the_second_of_two_jobs_waits_and_hears_who_uses_what():
    first, second = decide([job("a", queued_at=1), job("b", queued_at=2)])
    assert first == Start("a", "cpu", 4)
    message = "waits for 4 accelerators of slotline_worker; 0 of 4 free (job a uses 4)"
    assert second == Wait("b", "WAITS_FOR_ACCELERATORS", message)


def test_a_gang_starts_whole_or_not_at_all():
    (answer,) = decide([job("a", 3)], [Holder("x", "default", 2, "cpu")])
    assert answer.reason == "WAITS_FOR_ACCELERATORS" and "2 of 4 free (job x uses 2)" in answer.message


def test_priority_comes_before_age():
    answers = decide([job("old", queued_at=1), job("urgent", queued_at=9, priority=5)])
    assert [answer.job_id for answer in answers] == ["urgent", "old"]
    assert isinstance(answers[0], Start)


def test_small_jobs_do_not_overtake_a_large_one_that_waits_for_accelerators():
    answers = decide(
        [job("large", 4, queued_at=1), job("small", 1, queued_at=2)], [Holder("x", "q", 2, "cpu")]
    )
    assert [answer.reason for answer in answers] == ["WAITS_FOR_ACCELERATORS", "WAITS_BEHIND"]
    assert "kept for job large" in answers[1].message


def test_a_job_too_large_for_the_cluster_holds_nobody_up():
    answers = decide([job("huge", 8, queued_at=1), job("small", 4, queued_at=2)])
    assert answers[0].reason == "CLUSTER_TOO_SMALL" and "needs 8" in answers[0].message
    assert answers[1] == Start("small", "cpu", 4)


def test_a_quota_holds_only_its_own_queue_back():
    quotas = {"small": 2, "default": None}
    answers = decide(
        [job("a", 2, queue="small", queued_at=1), job("b", 2, queue="default", queued_at=2)],
        [Holder("x", "small", 1, "cpu")],
        quotas=quotas,
    )
    assert answers[0].reason == "WAITS_FOR_QUOTA" and "1 of its quota of 2 free" in answers[0].message
    assert answers[1] == Start("b", "cpu", 2)


def test_jobs_fill_their_quota_to_the_last_accelerator():
    assert decide([job("a", 2, queue="small")], quotas={"small": 2}) == [Start("a", "cpu", 2)]
    held = [Holder("x", "small", 2, "cuda")]
    assert decide([job("a", 1, queue="small")], held, quotas={"small": 3}) == [Start("a", "cpu", 1)]
    answers = decide(
        [job(name, 1, queue="small", queued_at=place) for place, name in enumerate("abc")],
        quotas={"small": 2},
    )
    assert [type(answer) for answer in answers] == [Start, Start, Wait]
    assert "0 of its quota of 2 free" in answers[2].message


def test_gangs_fill_the_cluster_to_the_last_accelerator():
    held = [Holder("x", "q", 1, "cpu"), Holder("y", "q", 8, "cuda")]
    answers = decide(
        [job("a", 1, device="cpu", queued_at=1), job("b", 2, device="cpu", queued_at=2)],
        held,
        capacity=Capacity({"cpu": 4, "cuda": 8}),
    )
    assert answers == [Start("a", "cpu", 1), Start("b", "cpu", 2)]


def test_a_quota_of_nothing_lets_nothing_start():
    (answer,) = decide([job("a", 1, queue="small")], quotas={"small": 0})
    assert answer.reason == "WAITS_FOR_QUOTA" and "the quota of queue small is 0" in answer.message


def test_a_job_larger_than_its_quota_is_told_what_to_change():
    (answer,) = decide([job("a", 4, queue="small")], quotas={"small": 2})
    assert answer.reason == "WAITS_FOR_QUOTA" and "SLOTLINE_QUEUES" in answer.message


def test_a_job_that_backs_off_waits_until_its_time():
    waiting = job("a", not_before=105.0)
    assert decide([waiting], now=104.9)[0].reason == "BACKING_OFF"
    assert decide([waiting], now=105.0) == [Start("a", "cpu", 4)]


def test_without_a_cluster_every_job_waits():
    assert [answer.reason for answer in decide([job("a"), job("b")], capacity=None)] == [
        "WAITS_FOR_CLUSTER"
    ] * 2


@pytest.mark.parametrize(
    ("device", "cuda", "chosen"),
    [("auto", 4, "cuda"), ("auto", 3, "cpu"), ("cpu", 8, "cpu"), ("cuda", 8, "cuda")],
)
def test_auto_takes_cuda_where_the_gang_fits(device: str, cuda: int, chosen: str):
    assert decide([job("a", device=device)], capacity=Capacity({"cpu": 4, "cuda": cuda})) == [
        Start("a", chosen, 4)
    ]


def test_auto_takes_cpu_where_the_cluster_has_never_told_of_a_gpu():
    assert decide([job("a", 1)], capacity=Capacity({"cpu": 1})) == [Start("a", "cpu", 1)]


def test_a_job_that_waits_hears_of_three_that_use_what_it_needs_and_how_many_more():
    holders = [Holder(name, "default", 1, "cpu") for name in "vwxyz"]
    (three,) = decide([job("a", 2)], holders[:3])
    assert three.message.endswith("; 1 of 4 free (job v uses 1, job w uses 1, job x uses 1)")
    (five,) = decide([job("a", 2)], holders, capacity=Capacity({"cpu": 6}))
    assert five.message.endswith("(job v uses 1, job w uses 1, job x uses 1, 2 more jobs use 2)")


def test_a_job_that_waits_for_its_quota_hears_how_much_is_free_and_who_uses_the_rest():
    held = [Holder("x", "small", 2, "cpu"), Holder("y", "other", 1, "cpu")]
    (answer,) = decide([job("a", 4, queue="small")], held, quotas={"small": 5})
    assert answer.message == (
        "waits for 4 accelerators of queue small; 3 of its quota of 5 free (job x uses 2)"
    )


def test_a_job_that_waits_hears_of_no_less_than_nothing_free():
    (answer,) = decide([job("a", 1)], [Holder("x", "default", 6, "cpu")])
    assert "; 0 of 4 free" in answer.message, "the cluster shrank while x ran"


def test_a_job_that_the_cluster_can_never_hold_is_told_what_to_change():
    (few,) = decide([job("a", 5, device="cpu")])
    assert few.message == (
        "needs 5 accelerators of slotline_worker; the cluster has 4: add nodes, "
        "or submit with fewer resources.meshes"
    )
    (none,) = decide([job("a", 1, device="cuda")])
    assert none.message.endswith("or submit with another resources.device")
    (began,) = decide([job("a", 5, device="cpu", began=True)])
    assert began.message.startswith(
        "waits for 5 accelerators of slotline_worker, the cluster has 4; it began on cpu"
    )


jobs = st.lists(
    st.builds(
        WaitingJob,
        id=st.uuids().map(str),
        queue=st.sampled_from(["q", "r"]),
        priority=st.integers(-2, 2),
        queued_at=st.floats(0, 10),
        accelerators=st.integers(1, 6),
        device=st.sampled_from(["auto", "cpu", "cuda"]),
        not_before=st.none() | st.floats(0, 20),
    ),
    max_size=8,
    unique_by=lambda one: one.id,
)


@given(jobs, st.integers(0, 6), st.integers(0, 6), st.none() | st.integers(0, 8))
def test_never_more_is_given_than_there_is_and_every_job_gets_one_answer(waiting, cpu, cuda, quota):
    answers = decide(waiting, capacity=Capacity({"cpu": cpu, "cuda": cuda}), quotas={"q": quota}, now=10.0)
    assert sorted(answer.job_id for answer in answers) == sorted(one.id for one in waiting)
    known = {one.id: one for one in waiting}
    started = [(known[answer.job_id], answer.device) for answer in answers if isinstance(answer, Start)]
    for device, total in (("cpu", cpu), ("cuda", cuda)):
        assert sum(one.accelerators for one, where in started if where == device) <= total
    if quota is not None:
        assert sum(one.accelerators for one, _ in started if one.queue == "q") <= quota
    assert all(one.not_before is None or one.not_before <= 10.0 for one, _ in started)
    if not started and not any(
        isinstance(a, Wait) and a.reason in ("BACKING_OFF", "WAITS_FOR_QUOTA") for a in answers
    ):
        assert all(isinstance(a, Wait) and a.reason == "CLUSTER_TOO_SMALL" for a in answers)


# Watching

LIMITS = WatchLimits(
    silence_limit_s=100, start_timeout_s=50, cancel_grace_s=10, report_grace_s=3, stop_limit_s=15
)
STARTED = WatchedAttempt(created_at=0, submitted_at=1, heartbeat_at=None, cancel_requested_at=None, ray=None)
RUNNING = replace(STARTED, heartbeat_at=20, ray=RayJob(RayState.RUNNING))


def look(attempt: WatchedAttempt, now: float, since: float = 0.0):
    return decide_attempt(attempt, watching_since=since, now=now, limits=LIMITS)


def test_an_attempt_that_ray_was_never_given_is_submitted():
    assert look(replace(STARTED, submitted_at=None), 1) == Submit()


def test_an_attempt_that_ray_does_not_take_is_given_up_at_the_limit_of_a_start():
    pending = replace(STARTED, submitted_at=None)
    assert look(pending, 49) == Submit()
    answer = look(pending, 50)
    assert (answer.state, answer.reason) == (AttemptState.FAILED, "START_TIMEOUT")
    assert look(pending, 1000, since=990) == Submit(), "the control plane itself was away"


def test_an_attempt_cancelled_before_its_start_ends():
    answer = look(replace(STARTED, submitted_at=None, cancel_requested_at=0.5), 1)
    assert answer == EndAttempt(AttemptState.CANCELLED, "CANCELLED_BY_USER", "cancelled by the user")


def test_a_driver_that_reports_is_left_alone():
    assert look(RUNNING, 25) == DoNothing()


def test_a_driver_that_ended_without_a_final_report_is_lost_after_a_moment():
    ended = replace(RUNNING, ray=RayJob(RayState.FAILED, "killed", 1, ended_seen_at=30.0))
    assert look(ended, 32.9) == DoNothing()
    answer = look(ended, 33)
    assert (answer.state, answer.reason) == (AttemptState.FAILED, "DRIVER_LOST")
    assert "exit code 1" in answer.message and "killed" in answer.message


@pytest.mark.parametrize("code", [137, -9])
def test_a_driver_that_was_killed_is_lost_as_soon_as_ray_says_so(code: int):
    """No report of it is to come."""
    answer = look(replace(RUNNING, ray=RayJob(RayState.FAILED, None, code, ended_seen_at=30.0)), 30)
    assert (answer.state, answer.reason) == (AttemptState.FAILED, "DRIVER_LOST")
    for other in (0, 1, 143, None):  # it may have handled what ended it
        ended = replace(RUNNING, ray=RayJob(RayState.FAILED, None, other, ended_seen_at=30.0))
        assert look(ended, 30) == DoNothing()


def test_code_that_cannot_be_installed_is_told_in_the_installers_words():
    text = (
        "runtime_env setup failed: Failed to set up runtime environment.\n[Node 10.0.0.1] Traceback:\n"
        "  File x, line 1\nLast 50 lines of stdout:\n    Looking in indexes: somewhere\n"
        "    ERROR: No matching distribution found for nothing==99\n"
    )
    answer = look(replace(STARTED, ray=RayJob(RayState.FAILED, text, ended_seen_at=0.0)), 40)
    assert answer.reason == "CODE_SETUP_FAILED"
    assert answer.message == (
        "the job's code could not be set up: No matching distribution found for nothing==99; "
        "correct code.pip or code.working_dir"
    )


@pytest.mark.parametrize("last", ["Timed out after 600 s", "  Timed out after 600 s \n\n"])
def test_code_that_cannot_be_set_up_is_told_by_the_last_line_where_the_installer_says_nothing(last: str):
    text = f"runtime_env setup failed: Failed to set up.\nTraceback:\nsecond but last\n{last}"
    answer = look(replace(STARTED, ray=RayJob(RayState.FAILED, text, ended_seen_at=0.0)), 40)
    assert answer.message == (
        "the job's code could not be set up: Timed out after 600 s; correct code.pip or code.working_dir"
    )


def test_a_lost_driver_is_told_with_what_ray_says_but_without_its_log():
    ended = replace(
        RUNNING, ray=RayJob(RayState.FAILED, "killed, last available logs: many", ended_seen_at=0.0)
    )
    assert look(ended, 40).message == "the driver ended (FAILED) and sent no final report: killed"
    silent = replace(RUNNING, ray=RayJob(RayState.SUCCEEDED, None, 0, ended_seen_at=0.0))
    assert (
        look(silent, 40).message == "the driver ended (SUCCEEDED) with exit code 0 and sent no final report"
    )


def test_a_cluster_that_forgot_the_attempt_was_restarted():
    answer = look(replace(RUNNING, ray=RayJob(RayState.MISSING, ended_seen_at=0.0)), 30)
    assert answer.reason == "DRIVER_LOST" and "restarted" in answer.message


def test_a_driver_that_never_reports_is_stopped_then_named():
    pending = replace(STARTED, ray=RayJob(RayState.PENDING))
    assert look(pending, 49) == DoNothing()
    assert isinstance(look(pending, 50), StopDriver)
    stopped = replace(STARTED, ray=RayJob(RayState.STOPPED, ended_seen_at=52.0))
    assert look(stopped, 60).reason == "START_TIMEOUT"


def test_a_silent_driver_that_ray_still_runs_is_stopped_only_after_the_long_limit():
    assert look(RUNNING, 119) == DoNothing()
    assert isinstance(look(RUNNING, 120), StopDriver)


def test_the_absence_of_the_control_plane_is_not_taken_for_the_drivers():
    assert look(RUNNING, 1000, since=990) == DoNothing()
    assert isinstance(look(RUNNING, 1090, since=990), StopDriver)


def test_an_attempt_out_of_reach_ends_when_it_is_silent_too_long():
    assert look(replace(RUNNING, ray=None), 119) == DoNothing()
    assert look(replace(RUNNING, ray=None), 120).reason == "DRIVER_LOST"


def test_a_cancelled_driver_has_its_grace_then_is_stopped_then_ends():
    cancelled = replace(RUNNING, cancel_requested_at=21)
    assert look(cancelled, 30) == DoNothing()
    assert isinstance(look(cancelled, 31), StopDriver)
    gone = replace(cancelled, ray=RayJob(RayState.STOPPED, ended_seen_at=31.0))
    assert look(gone, 34).state is AttemptState.CANCELLED


@pytest.mark.parametrize("ray", [RayJob(RayState.PENDING), RayJob(RayState.RUNNING)], ids=str)
@pytest.mark.parametrize("heartbeat_at", [None, 44.0])
def test_a_cancelled_driver_that_ray_does_not_stop_holds_nothing_behind_the_limit(ray, heartbeat_at):
    stopping = replace(
        STARTED, ray=ray, heartbeat_at=heartbeat_at, cancel_requested_at=21, stop_asked_at=31.0
    )
    assert isinstance(look(stopping, 45.9), StopDriver)
    assert look(stopping, 46).state is AttemptState.CANCELLED


def test_a_cancelled_driver_that_was_never_heard_is_stopped_at_once():
    assert isinstance(
        look(replace(STARTED, ray=RayJob(RayState.PENDING), cancel_requested_at=21), 21), StopDriver
    )


def test_no_stop_of_a_driver_waits_for_ray_for_ever():
    late = replace(RUNNING, end_asked_at=30.0, end_asked_for=Reason.PREEMPTED, stop_asked_at=95.0)
    assert isinstance(look(late, 109), StopDriver)
    answer = look(late, 110)
    assert answer.reason == "PREEMPTED" and "without Ray's word" in answer.message
    silent = replace(RUNNING, stop_asked_at=121.0)
    assert isinstance(look(silent, 135), StopDriver)
    assert look(silent, 136).reason == "DRIVER_LOST"


def test_a_driver_that_never_started_ends_with_what_ray_says_of_it():
    pending = RayJob(RayState.PENDING, "Job has not started yet: no worker\nits traceback")
    answer = look(replace(STARTED, ray=pending, stop_asked_at=50.0), 65)
    assert answer.reason == "START_TIMEOUT"
    assert answer.message.endswith("since its start; Ray says: PENDING: Job has not started yet: no worker")


# After a failure


def after(reason: str, before=(), **retry):
    failures = [FailedAttempt(earlier, f"why it was number {n}") for n, earlier in enumerate(before)]
    return after_failure(
        FailedAttempt(reason, "why"),
        allowed=RetrySection(**retry),
        before=failures,
        backoff_s=2,
        backoff_limit_s=10,
    )


def test_each_cause_has_its_own_retries():
    assert isinstance(after("WORKER_LOST", ["USER_CODE_RAISED"] * 5), TryAgain)
    assert isinstance(after("USER_CODE_RAISED"), FailJob)
    assert isinstance(after("USER_CODE_RAISED", ["NAN_LOSS"], user=2), TryAgain)
    assert isinstance(after("USER_CODE_RAISED", ["NAN_LOSS", "DATA_FAILED"], user=2), FailJob)
    assert isinstance(after("PREEMPTED", ["PREEMPTED"] * 99), TryAgain)


def test_an_illegal_address_is_the_accelerators_once_and_then_the_jobs_own():
    assert isinstance(after("ILLEGAL_ADDRESS", ["WORKER_LOST"]), TryAgain)
    assert isinstance(after("ILLEGAL_ADDRESS", ["ILLEGAL_ADDRESS"]), FailJob)
    assert isinstance(after("ILLEGAL_ADDRESS", ["ILLEGAL_ADDRESS"], user=1), TryAgain)


def after_failures(*failures: FailedAttempt, **retry):
    return after_failure(
        failures[-1], allowed=RetrySection(**retry), before=failures[:-1], backoff_s=2, backoff_limit_s=10
    )


def test_what_failed_within_an_attempt_in_the_same_words_at_the_same_step_is_not_tried_again():
    disk = FailedAttempt("CHECKPOINT_FAILED", "m1/0 cannot write 4096 bytes at 0x7f3a: no space is left", 20)
    again = replace(disk, message="m0/1 cannot write 512 bytes at 0xbeef: no space is left")
    assert isinstance(after_failures(disk), TryAgain)
    answer = after_failures(disk, again)
    assert isinstance(answer, FailJob)
    assert answer.message.startswith(
        f"{again.message} (the attempt before failed in the same way behind step 20"
    )
    assert "`slotline retry`" in answer.message
    early = FailedAttempt("INTERNAL", "KeyError: 'x'")
    assert "in the same way before the first step" in after_failures(early, early).message
    assert isinstance(after_failures(disk, again, infrastructure=-1), TryAgain)
    for other in (
        replace(disk, step=30),
        replace(disk, message="the store does not answer"),
        replace(disk, reason="INTERNAL"),
    ):
        assert isinstance(after_failures(disk, other), TryAgain), other
        assert isinstance(after_failures(disk, other, again), TryAgain), other


def lost(first: int | None, last: int | None, reason: str = "WORKER_LOST") -> FailedAttempt:
    return FailedAttempt(reason, f"gone behind {last}", last, first)


@pytest.mark.parametrize(
    ("failures", "counted"),
    [
        ([lost(1, 30), lost(26, 41), lost(36, 50)], [2]),  # each went on from a copy of the one before
        ([lost(1, 30), lost(1, 41), lost(1, 50)], [0, 1, 2]),  # further, but of nothing that was kept
        ([lost(1, 30), lost(26, 30), lost(26, 30)], [0, 1, 2]),  # from a copy, and no step further
        ([lost(1, 30), lost(26, 30), lost(26, 31)], [1, 2]),
        ([lost(1, 60), lost(26, 40), lost(36, 50)], [0, 2]),  # the first got furthest
        ([lost(1, 30), lost(None, 30), lost(26, 45)], [1, 2]),  # the second may have gone on from 26 as well
        ([lost(1, 30), lost(None, 30), lost(26, 45), lost(41, 52)], [3]),
        ([lost(None, None), lost(None, None), lost(1, 5)], [0, 1, 2]),
        ([lost(1, 30), lost(26, 41), lost(None, 41)], [1, 2]),  # the last had no step yet
        ([lost(1, 30, "NAN_LOSS"), lost(1, 30, "PREEMPTED"), lost(26, 41)], [0, 1, 2]),
        ([lost(1, 30), lost(26, 41, "PREEMPTED"), lost(36, 50, "NAN_LOSS")], [1, 2]),
        ([], []),
    ],
)
def test_a_failure_counts_until_a_later_attempt_goes_on_from_further_and_past_it(
    failures: list[FailedAttempt], counted: list[int]
):
    assert without_made_good(failures) == [failures[index] for index in counted]


@pytest.mark.parametrize(
    "reason", ["WORKER_LOST", "NODE_LOST", "SLOT_STALLED", "OUT_OF_MEMORY", "DRIVER_LOST"]
)
def test_what_happens_to_an_attempt_is_tried_as_often_as_the_job_allows(reason):
    lost = FailedAttempt(reason, "worker 0 of mesh m1 is gone", 7)
    assert isinstance(after_failures(lost, lost, lost), TryAgain)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_job_is_tried_again_as_often_as_it_asked_and_not_once_more(limit: int):
    for failures in range(limit):
        assert isinstance(after("WORKER_LOST", ["DRIVER_LOST"] * failures, infrastructure=limit), TryAgain)
    assert isinstance(after("WORKER_LOST", ["DRIVER_LOST"] * limit, infrastructure=limit), FailJob)


def test_a_code_of_a_newer_driver_counts_as_infrastructure(monkeypatch):
    monkeypatch.setattr(reasons, "strict", False)
    assert isinstance(after("SOMETHING_NEW", ["DRIVER_LOST"] * 3), FailJob)


def test_the_pause_doubles_up_to_its_limit():
    pauses = [after("NODE_LOST", ["DRIVER_LOST"] * n, infrastructure=-1).after_s for n in range(5)]
    assert pauses == [2, 4, 8, 10, 10]


@pytest.mark.parametrize("reason", ["WORKER_LOST", "DRIVER_LOST"])
def test_the_first_retry_behind_a_lost_process_has_no_pause(reason: str):
    pauses = [after(reason, ["NODE_LOST"] * n, infrastructure=-1).after_s for n in range(5)]
    assert pauses == [0, 4, 8, 10, 10]
    assert after(reason, ["USER_CODE_RAISED"]).after_s == 0, "each cause has pauses of its own"
    assert after("SLOT_STALLED").after_s == 2


def test_the_last_word_says_what_failed_and_which_limit_was_reached():
    assert after("WORKER_LOST", ["WORKER_LOST"] * 3).message == "why (retry.infrastructure is 3)"
    assert after("NAN_LOSS").message == "why"
    assert after("NAN_LOSS", ["NAN_LOSS"], user=1).message == "why (retry.user is 1)"
    assert after("WORKER_LOST", infrastructure=0).message == "why (retry.infrastructure is 0)"


def test_a_retry_says_which_it_is_of_how_many_and_after_what_pause():
    answer = after("WORKER_LOST", ["WORKER_LOST"])
    assert answer.message == "why; infrastructure retry 2 of 3 in 4 s"
    assert after("WORKER_LOST", infrastructure=-1).message == "why; infrastructure retry 1 at once"
    assert after("NAN_LOSS", user=1).message == "why; user retry 1 of 1 in 2 s"
