"""Clients of an HTTP server that ask one thing after another, and how long each answer took."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Ask = Callable[[aiohttp.ClientSession], Awaitable[None]]


@dataclass
class Answers:
    """Seconds of each answer, and over how long they came."""

    seconds: list[float] = field(default_factory=list)
    lasted_s: float = 0.0

    @property
    def per_second(self) -> float:
        return len(self.seconds) / self.lasted_s

    def quantile(self, share: float) -> float:
        return statistics.quantiles(self.seconds, n=1000, method="inclusive")[round(share * 1000) - 1]

    def add(self, other: Answers) -> None:
        self.seconds += other.seconds
        self.lasted_s += other.lasted_s


async def by_clients(
    url: str,
    ask: Ask,
    *,
    clients: int,
    lasts_s: float,
    pause_s: float = 0.0,
    headers: dict[str, str] | None = None,
) -> Answers:
    """`clients` that each ask again `pause_s` after they have the answer, each over a connection of its own."""
    answers = Answers()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(
        url, connector=connector, timeout=timeout, headers=headers, trust_env=False
    ) as session:
        begun_at = time.perf_counter()

        async def one() -> None:
            while (asked_at := time.perf_counter()) < begun_at + lasts_s:
                await ask(session)
                answers.seconds.append(time.perf_counter() - asked_at)
                if pause_s:
                    await asyncio.sleep(pause_s)

        await asyncio.gather(*(one() for _ in range(clients)))
        answers.lasted_s = time.perf_counter() - begun_at
    return answers


def posting(path: str, body: Any, *, status: int) -> Ask:
    """Asks POST of `body` as JSON; another answer than `status` ends the benchmark."""

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.post(path, json=body) as response:
            text = await response.text()
            assert response.status == status, f"{path} answered {response.status}: {text[:500]}"

    return ask


def getting(path: str) -> Ask:
    """Asks GET."""

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.get(path) as response:
            text = await response.text()
            assert response.status == 200, f"{path} answered {response.status}: {text[:500]}"

    return ask
