"""`make bench-service`: the control plane's API beside Ray's own Jobs API, in one run on one machine.

1. Submissions a second, 8 clients, our two databases and Ray in turns: ratios, and processor time a submission.
2. What reads and submits take while 1,000 jobs wait, 4 train, 200 clients follow events and 3,000 are history.
3. The longest that one hostile body keeps the event loop from turning.
4. What reads take, 8 clients, while 10,000 jobs wait (`--waiting`), and what a round of the orchestrator takes.
Prints Markdown; about eight minutes. The control plane runs in a process of its own as `slotline serve` runs it, on a
cluster in memory; PostgreSQL is one of its own, with fsync.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.service import crowd, hostile, queue, submissions
from tests.benchmarks.service.load import Answers
from tests.benchmarks.service.server import served
from tests.service.postgres import is_installed, private_postgres

BLOCKING_LIMIT_S = 0.2
WANTED_RATIO = 10.0


@dataclass
class Side:
    answers: Answers = field(default_factory=Answers)
    processor_s: float = 0.0
    rates: list[float] = field(default_factory=list)


async def compare_submissions(databases: dict[str, str], rounds: int, lasts_s: float) -> None:
    sides = {name: Side() for name in [*databases, "Ray Jobs API"]}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(served(url, Path(stack.enter_context(_folder())), accelerators=0))
            for name, url in databases.items()
        }
        for _ in range(rounds):
            for name, server in servers.items():
                _add(sides[name], *await submissions.to_slotline(server, lasts_s=lasts_s))
                await asyncio.sleep(2.0)
            async with submissions.local_ray(Path(stack.enter_context(_folder()))) as ray:
                _add(sides["Ray Jobs API"], *await submissions.to_ray(ray, lasts_s=lasts_s))
    ray_side = sides["Ray Jobs API"]
    print(
        f"\n| {submissions.CLIENTS} clients | submissions/s (rounds) | beside Ray | p50 ms | p99 ms | cpu ms each |"
    )
    print("|---|---|---|---|---|---|")
    for name, side in sides.items():
        rates = ", ".join(f"{rate:.0f}" for rate in side.rates)
        ratio = side.answers.per_second / ray_side.answers.per_second
        p50, p99 = side.answers.quantile(0.5), side.answers.quantile(0.99)
        each_ms = 1e3 * side.processor_s / len(side.answers.seconds)
        rate = f"{side.answers.per_second:.0f} ({rates})"
        print(f"| {name} | {rate} | {ratio:.1f} x | {1e3 * p50:.0f} | {1e3 * p99:.0f} | {each_ms:.1f} |")


def _add(side: Side, answers: Answers, processor_s: float) -> None:
    side.answers.add(answers)
    side.processor_s += processor_s
    side.rates.append(answers.per_second)


async def ask_in_a_crowd(name: str, url: str, lasts_s: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await crowd.add_history(url)
        accelerators = crowd.TRAINING * crowd.ACCELERATORS_A_JOB
        with served(url, Path(folder), accelerators=accelerators) as server:
            attempts = await crowd.started(server, url)
            await crowd.add_waiting(server)
            begun = server.told()["processor_s"]
            answers, seen = await crowd.measured(server, attempts, lasts_s=lasts_s)
            told = server.told()
    print(
        f"\n{name}, {lasts_s:g} s: {told['processor_s'] - begun:.1f} s of processor time, "
        f"the loop blocked for at most {told['blocked_wall_s']:.3f} s ({told['blocked_cpu_s']:.3f} s of its own time), "
        f"{seen.events} events through {crowd.STREAMS} streams, which broke {seen.broken} times\n"
    )
    print("| | answers | p50 ms | p99 ms |\n|---|---|---|---|")
    for kind, found in answers.items():
        p50, p99 = 1e3 * found.quantile(0.5), 1e3 * found.quantile(0.99)
        print(f"| {kind} | {len(found.seconds)} | {p50:.0f} | {p99:.0f} |")


async def hurt(url: str) -> bool:
    """Whether every hostile body left the loop free."""
    good = True
    with tempfile.TemporaryDirectory() as folder, served(url, Path(folder), accelerators=0) as server:
        print("\n| hostile body | answer | after s | loop blocked s | of its own processor time s |")
        print("|---|---|---|---|---|")
        for body in hostile.bodies():
            one = await hostile.blocking(server, body)
            good &= one.cpu_s < BLOCKING_LIMIT_S
            status = one.status or "hung up"
            print(f"| {body.name} | {status} | {one.answered_s:.2f} | {one.wall_s:.3f} | {one.cpu_s:.3f} |")
    return good


@contextlib.contextmanager
def _folder():
    with tempfile.TemporaryDirectory() as folder:
        yield folder


async def run(arguments: argparse.Namespace) -> None:
    parts = arguments.parts.split(",")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_folder()))
        template = stack.enter_context(private_postgres(durable=True)) if is_installed() else None
        if template is None:
            print("PostgreSQL is not installed: SQLite only")

        def databases(purpose: str) -> dict[str, str]:
            found = {"SQLite": f"sqlite+aiosqlite:///{folder / purpose}.db"}
            if template is not None:
                found["PostgreSQL"] = _created(template, purpose)
            return found

        if "submissions" in parts:
            await compare_submissions(databases("submissions"), arguments.rounds, arguments.seconds)
        if "crowd" in parts:
            for name, url in databases("crowd").items():
                await ask_in_a_crowd(name, url, 4 * arguments.seconds)
        if "queue" in parts:
            for name, url in databases("queue").items():
                with _folder() as place:
                    lasts_s = arguments.seconds
                    await queue.measure(name, url, Path(place), jobs=arguments.waiting, lasts_s=lasts_s)
        if "hostile" in parts and not await hurt(databases("hostile")["SQLite"]):
            raise SystemExit(f"a body blocked the loop for more than {BLOCKING_LIMIT_S} s")


def _created(template: str, name: str) -> str:
    import psycopg

    with psycopg.connect(template.format("postgres").replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return template.format(name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-service", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long one turn lasts")
    parser.add_argument("--parts", default="submissions,crowd,queue,hostile", help="which of the four")
    parser.add_argument("--waiting", type=int, default=10_000, help="jobs of the long queue")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
