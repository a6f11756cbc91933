"""Silence counts only while this process could have heard; nothing is stopped before what waits was heard."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import pytest
from sqlalchemy.exc import OperationalError

from service.orchestrator.attempts.liveness import RECONNECT_S, LivenessWindow
from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.spec.states import AttemptState
from service.store.attempts import find_attempt
from service.store.database import utc_now
from service.store.events import events_of
from tests.service.fake_cluster import ask_at_once
from tests.service.orchestrator.test_loop import World, world

__all__ = ["world"]


def test_time_in_which_nothing_was_heard_is_no_silence():
    liveness = LivenessWindow(100.0, gap_s=5, return_s=10)
    for at in (101.0, 104.0, 109.0):
        liveness.record_contact(at)
    assert liveness.listening_s(102.0, 108.0) == 6
    assert liveness.listening_s(0.0, 110.0) == 10, "from its own beginning on"
    assert liveness.listening_s(102.0, 200.0) == 7, "the time since it last heard may be deaf"
    liveness.record_contact(200.0)
    assert liveness.listening_s(102.0, 205.0) == 7, "what waits is waited for"
    liveness.record_contact(205.0)
    liveness.record_contact(210.0)
    liveness.record_contact(214.0)
    assert liveness.listening_s(102.0, 215.0) == 12
    assert liveness.listening_s(212.0, 215.0) == 3


def test_several_deaf_times_that_touch_count_once():
    liveness = LivenessWindow(0.0, gap_s=5, return_s=10)
    for at in (20.0, 40.0, 44.0, 48.0, 52.0):
        liveness.record_contact(at)
    assert liveness.listening_s(0.0, 53.0) == 3, "deaf from 0 to 30 and from 30 to 50"


async def _kinds(world: World, job_id: str) -> list[str]:
    async with world.database.read() as session:
        return [event.kind for event in await events_of(session, job_id)]


async def _last_heard(world: World, job_id: str, seconds_ago: float) -> None:
    async with world.database.write() as session:
        (await find_attempt(session, f"{job_id}-1")).heartbeat_at = utc_now() - timedelta(seconds=seconds_ago)


async def test_a_control_plane_that_was_frozen_stops_no_driver_when_it_wakes(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    job_id = await world.start()
    world.orchestrator.heartbeat.liveness.since -= 1000
    await world.rounds(2)
    now = time.time()
    clock = [now + 500]  # five times the limit, with the driver's reports in the socket
    monkeypatch.setattr(time, "time", lambda: clock[0])
    await world.rounds(3)
    assert world.cluster.stopped == [] and "silent" not in await _kinds(world, job_id)
    clock[0] += 2
    await world.rounds(3)
    assert world.cluster.stopped == []
    # a driver that stays silent although it could be heard is stopped after all
    for _ in range(30):
        clock[0] += 4
        await world.rounds(1)
        if world.cluster.stopped:
            break
    assert world.cluster.stopped == [f"{job_id}-1"] and clock[0] - now - 500 > RECONNECT_S + 100 - 8


async def test_a_database_that_takes_no_writes_makes_no_driver_silent(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    job_id = await world.start()
    world.orchestrator.heartbeat.liveness.since -= 1000
    await world.rounds(1)
    began = time.time()
    clock, write = [began], world.database.write
    monkeypatch.setattr(time, "time", lambda: clock[0])

    def refused():
        raise OperationalError("UPDATE", {}, Exception("the database is read-only"))

    with caplog.at_level(logging.INFO):
        world.database.write = refused
        for _ in range(100):  # 200 s; its rounds read, so they go on
            clock[0] += 2
            await world.rounds(1)
        world.database.write = write
        for _ in range(5):
            clock[0] += 2
            await world.rounds(1)
    assert world.cluster.stopped == []
    told = [r.getMessage() for r in caplog.records if "database" in r.getMessage()]
    assert len(told) == 2 and "does not answer" in told[0] and "is back" in told[1], "an outage is two lines"
    assert not any(record.exc_info for record in caplog.records)
    assert (await world.job(job_id)).state == "RUNNING"


async def test_a_driver_that_was_heard_while_it_was_judged_is_not_stopped(world: World):
    job_id = await world.start()
    world.orchestrator.heartbeat.liveness.since -= 1000
    await _last_heard(world, job_id, 101)
    ask = world.cluster.job

    async def report_meanwhile(attempt_id: str) -> RayJob:
        await world.report(attempt_id, 2)
        world.cluster.job = ask
        return await ask(attempt_id)

    ask_at_once(world.orchestrator.attempts)
    world.cluster.job = report_meanwhile
    await world.rounds(2)
    assert world.cluster.stopped == []


async def test_why_slotline_stopped_a_driver_is_an_event_and_stays_the_reason(world: World):
    job_id = await world.start(retry={"infrastructure": 0})
    world.orchestrator.heartbeat.liveness.since -= 1000
    await _last_heard(world, job_id, 101)
    await world.rounds(1)
    assert world.cluster.stopped == [f"{job_id}-1"]
    async with world.database.read() as session:
        events = [event for event in await events_of(session, job_id) if event.kind == "stopped"]
    assert [e.message for e in events] == ["Slotline stops the driver: the driver has said nothing for 100 s"]
    # it hears SIGTERM after all, and says that somebody told it to end
    await world.report(f"{job_id}-1", 2, state=AttemptState.CANCELLED)
    job = await world.job(job_id)
    assert "Slotline stopped the driver: the driver has said nothing for 100 s" in job.message
    assert "somebody else" not in job.message


async def test_a_stopped_driver_that_ends_without_a_word_ended_because_of_slotline(world: World):
    job_id = await world.start(retry={"infrastructure": 0})
    world.orchestrator.heartbeat.liveness.since -= 1000
    await _last_heard(world, job_id, 101)
    await world.rounds(1)
    world.restart()  # a control plane that counts silence from its own start knows it from the store
    world.cluster.states[f"{job_id}-1"] = RayJob(RayState.STOPPED, "Job was intentionally stopped.")
    world.orchestrator.attempts.limits = world.orchestrator.attempts.limits.__class__(report_grace_s=0.0)
    await world.rounds(2)
    job = await world.job(job_id)
    assert job.state == "FAILED"
    assert "Slotline stopped the driver: the driver has said nothing for 100 s" in job.message


async def test_a_cluster_that_is_away_is_one_line_in_the_log(world: World, caplog: pytest.LogCaptureFixture):
    await world.start()
    world.cluster.away = True
    with caplog.at_level(logging.INFO):
        await world.rounds(30)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 2
