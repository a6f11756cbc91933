"""What the control plane asks of any Ray, and what each answer has to hold: for a real Ray, of whichever version."""

from __future__ import annotations

import asyncio
import io
import os
import shlex
import zipfile
from typing import Any

from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.ray.jobs_api import RayCluster, RayJobSubmission


async def ended(cluster: RayCluster, submission_id: str, limit_s: float = 150.0) -> RayJob:
    async with asyncio.timeout(limit_s):
        while not (job := await cluster.job(submission_id)).state.ended:
            await asyncio.sleep(0.2)
    return job


def submission(python: str, name: str, code: str, **changes: Any) -> RayJobSubmission:
    return RayJobSubmission(
        name, f"{python} -c {code!r}", {"GREETING": "hello"}, {"slotline_job": name}, **changes
    )


async def answers_all_that_is_asked(cluster: RayCluster, python: str) -> None:
    """Every call of a Cluster, on a Ray with three `slotline_worker`; `python` is the one that Ray itself runs with."""
    (node,) = await cluster.nodes()
    assert node.resources["slotline_worker"] == 3

    first = submission(python, "first", "import os; print(os.environ['GREETING'], 42, 'nice', os.nice(0))")
    await cluster.submit(first)
    await cluster.submit(first)  # a repeated start is one start
    sleeper = submission(python, "sleeper", "import time; time.sleep(1000)")
    await cluster.submit(sleeper)
    assert (await ended(cluster, "first")).state is RayState.SUCCEEDED
    assert (await cluster.log("first")).count(f"hello 42 nice {os.nice(0)}") == 1

    talker = "import time; print('x' * 200_000); time.sleep(2); print('late', 'words'); time.sleep(1000)"
    await cluster.submit(RayJobSubmission("talker", f"{python} -u -c {talker!r}", {}, {}))
    while (await cluster.job("talker")).state is RayState.PENDING:
        await asyncio.sleep(0.1)
    heard = bytearray()
    async with asyncio.timeout(60):
        async for piece in cluster.read_log("talker", follow=True):  # in pieces, and on while it prints
            heard += piece
            if b"late words" in heard:
                break
    assert heard.count(b"x" * 200_000) == 1
    assert "late words" in await cluster.log("talker")
    await cluster.stop("talker")

    holder = (
        "import ray, time; from ray.util.placement_group import placement_group as group; ray.init()\n"
        "one = group([{'slotline_worker': 1.0}] * 2, name='slotline-mine'); ray.get(one.ready())\n"
        "never = group([{'slotline_worker': 9.0}]); print('is', 'held', flush=True); time.sleep(1000)"
    )
    await cluster.submit(RayJobSubmission("holder", f"{python} -u -c {shlex.quote(holder)}", {}, {}))
    async with asyncio.timeout(100):
        while "is held" not in await cluster.log("holder"):
            await asyncio.sleep(0.2)
    await cluster.submit(
        RayJobSubmission("one", "sleep 1000", {}, {}, resources={"slotline_worker": 1.0})
    )  # as a worker that measures a job
    while (await cluster.job("one")).state is RayState.PENDING:
        await asyncio.sleep(0.1)
    held = [(one.name, dict(one.resources)) for one in await cluster.resources_in_use()]
    assert sorted(held) == [("", {"slotline_worker": 1.0}), ("slotline-mine", {"slotline_worker": 2.0})]
    await cluster.stop("holder")
    await cluster.stop("one")

    await cluster.submit(submission(python, "broken", "import sys; print('last words'); sys.exit(3)"))
    broken = await ended(cluster, "broken")
    assert (broken.state, broken.exit_code) == (RayState.FAILED, 3)

    while (await cluster.job("sleeper")).state is not RayState.RUNNING:
        await asyncio.sleep(0.1)
    await cluster.stop("sleeper")
    assert (await ended(cluster, "sleeper")).state is RayState.STOPPED
    await cluster.stop("sleeper")

    await cluster.stop("unknown")
    assert (await cluster.job("unknown")).state is RayState.MISSING
    assert await cluster.log("unknown") == ""

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("mine/__init__.py", "answer = 'from the package'\n")
    uris = [await cluster.upload_package("_ray_pkg_0123.zip", buffer.getvalue()) for _ in range(2)]
    assert uris[0] == uris[1]
    await cluster.submit(submission(python, "code", "import mine; print(mine.answer)", working_dir=uris[0]))
    assert (await ended(cluster, "code")).state is RayState.SUCCEEDED
    assert "from the package" in await cluster.log("code")
