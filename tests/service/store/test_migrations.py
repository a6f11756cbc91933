"""Rows that older versions wrote load and keep their meaning; on SQLite and on PostgreSQL."""

from __future__ import annotations

import json

from sqlalchemy import text

from service.spec.principals import Principal, Role
from service.store.attempts import find_attempt
from service.store.database import utc_now
from service.store.events import events_of
from service.store.files import find_package
from service.store.jobs import find_by_idempotency_key, find_job
from service.store.secrets import find_token
from tests.service.conftest import job_body
from tests.service.store.versions import make_chain_database


async def test_older_jobs_load_with_the_columns_that_were_taken_from_their_specifications(
    empty_database_url: str,
):
    """Also jobs whose specification no Slotline of today would take."""
    older = await make_chain_database(empty_database_url)
    specs = {
        "a": job_body(resources={"workers_per_mesh": 2}),
        "b": {"training": [3], "resources": {"workers_per_mesh": "x"}},
        "c": [1],
    }
    insert = (
        "INSERT INTO jobs (id, name, queue, priority, accelerators, device, spec, state, created_at, queued_at,"
        " attempts_made, attempts_forgiven, last_event, steps_wanted, workers_per_mesh) VALUES (:id, 'n', 'default', 0, 2,"
        " :device, :spec, 'FAILED', '2026-01-01 00:00:00', '2026-01-01 00:00:00', :made, 0, 0, :steps, :workers)"
    )
    attempt = (
        "INSERT INTO attempts (id, job_id, number, state, token, device, accelerators, created_at, last_sequence,"
        " log_first_line) VALUES ('a-1', 'a', 1, 'FAILED', 't', 'cuda', 2, '2026-01-01 00:00:00', 0, 1)"
    )
    async with older.engine.begin() as connection:
        for name, spec in specs.items():
            steps, workers, device = (10, 2, "cuda") if name == "a" else (0, 1, "auto")
            values = {"id": name, "spec": json.dumps(spec), "made": int(name == "a"), "device": device}
            await connection.execute(text(insert), {**values, "steps": steps, "workers": workers})
        await connection.execute(text(attempt))
    for _ in range(2):
        await older.start()
        async with older.read() as session:
            a, b, c = [await find_job(session, name) for name in specs]
        assert (a.steps_wanted, a.workers_per_mesh, a.device) == (10, 2, "cuda")
        assert (b.steps_wanted, b.workers_per_mesh, b.device) == (0, 1, "auto")
        assert (c.steps_wanted, c.workers_per_mesh) == (0, 1)
        assert [job.spec for job in (a, b, c)] == list(specs.values())
    await older.close()


async def test_older_jobs_have_the_seconds_of_their_steps(empty_database_url: str):
    """Up to the last step: what an attempt that resumes has not repeated yet is lost."""
    older = await make_chain_database(empty_database_url)
    at = "'2026-01-01 00:00:00'"
    job = (
        "INSERT INTO jobs (id, name, queue, priority, accelerators, device, spec, state, created_at, queued_at,"
        f" attempts_made, attempts_forgiven, last_event, step) VALUES (:id, 'n', 'default', 0, 2, 'auto', '{{}}', 'RUNNING',"
        f" {at}, {at}, 2, 0, 0, :step)"
    )
    step = "INSERT INTO steps (job_id, step, attempt, step_s) VALUES ('a', :step, :attempt, :step_s)"
    async with older.engine.begin() as connection:
        await connection.execute(text(job), [{"id": "a", "step": 3}, {"id": "b", "step": None}])
        rows = [(1, 1, 0.5), (2, 2, 0.25), (3, 2, None), (4, 1, 8.0)]
        names = ("step", "attempt", "step_s")
        await connection.execute(text(step), [dict(zip(names, row, strict=True)) for row in rows])
    await older.start()
    async with older.read() as session:
        assert [(await find_job(session, name)).trained_s for name in "ab"] == [0.75, 0.0]
    await older.close()


async def test_older_tokens_jobs_and_packages_stay_as_good_as_they_were(empty_database_url: str):
    """Rows without role and owner: tokens may do what they could, jobs are nobody's, keys find their jobs."""
    older = await make_chain_database(empty_database_url)
    at = "'2026-01-01 00:00:00'"
    async with older.engine.begin() as connection:
        await connection.execute(
            text(f"INSERT INTO tokens (name, digest, created_at) VALUES ('me', 'd', {at})")
        )
        await connection.execute(
            text(
                f"INSERT INTO packages (digest, created_at, size_bytes, content) VALUES ('p', {at}, 1, :zip)"
            ),
            {"zip": b"z"},
        )
        await connection.execute(text("INSERT INTO package_owners (digest, owner) VALUES ('p', '')"))
        await connection.execute(
            text(
                "INSERT INTO jobs (id, name, queue, priority, accelerators, device, spec, state, created_at,"
                " queued_at, attempts_made, attempts_forgiven, last_event, idempotency_key) VALUES ('a', 'n',"
                f" 'default', 0, 2, 'auto', '{{}}', 'FAILED', {at}, {at}, 0, 0, 1, 'key')"
            )
        )
        await connection.execute(
            text(
                "INSERT INTO events (job_id, number, at, kind, message)"
                f" VALUES ('a', 1, {at}, 'state', 'QUEUED')"
            )
        )
    for _ in range(2):
        await older.start()
        async with older.read() as session:
            job = await find_by_idempotency_key(session, "key")
            assert (job.id, job.owner) == ("a", "")
            assert await find_by_idempotency_key(session, "key", owner="alice") is None
            assert await find_token(session, "d", at=utc_now()) == Principal("me", Role.OPERATOR)
            assert await find_package(session, "p", owner="")
            assert not await find_package(session, "p", owner="alice")
            assert [event.principal for event in await events_of(session, "a")] == [None]
    await older.close()


async def test_older_attempts_are_the_default_clusters_and_so_are_jobs_that_began(empty_database_url: str):
    """Before and after this version starts: a replica of the version before writes rows without cluster, too."""
    older = await make_chain_database(empty_database_url)
    at = "'2026-01-01 00:00:00'"
    insert = (
        "INSERT INTO jobs (id, name, queue, priority, accelerators, device, spec, state, created_at, queued_at,"
        f" attempts_made, attempts_forgiven, last_event) VALUES (:id, 'n', 'default', 0, 2, 'auto', '{{}}', 'QUEUED', {at},"
        f" {at}, :made, 0, 0)"
    )
    attempt = (
        "INSERT INTO attempts (id, job_id, number, state, token, device, accelerators, created_at, last_sequence,"
        f" log_first_line) VALUES (:id, :job, 1, 'FAILED', 't', 'cpu', 2, {at}, 0, 1)"
    )
    for revision, began, fresh in (("0016", "a", "b"), ("head", "c", "d")):
        if revision == "head":
            await older.start()
        async with older.engine.begin() as connection:
            await connection.execute(text(insert), [{"id": began, "made": 1}, {"id": fresh, "made": 0}])
            await connection.execute(text(attempt), {"id": f"{began}-1", "job": began})
    for _ in range(2):
        await older.start()
        async with older.read() as session:
            for began, fresh in (("a", "b"), ("c", "d")):
                assert (await find_attempt(session, f"{began}-1")).cluster == "default"
                assert (await find_job(session, began)).began_on == "default"
                assert (await find_job(session, fresh)).began_on is None
    await older.close()
