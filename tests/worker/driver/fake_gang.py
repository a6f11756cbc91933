"""A gang without Ray: calls are made as the driver's gang makes them, and answered by whatever `remote` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from worker.driver import gang


class FakeGang:
    """The calls of worker/driver/gang.py; subclasses have `workers`, and `wait` where answers come later."""

    interrupted: Callable[[], None] = staticmethod(lambda: None)
    """Called where the driver's gang looks whether the attempt is to end; may raise."""

    ask, call, expect_steps = gang.Gang.ask, gang.Gang.call, gang.Gang.expect_steps

    def wait(self, refs: Sequence[Any], **_: Any) -> list[Any]:
        return list(refs)

    def raise_if_interrupted(self, phase: gang.Phase) -> None:
        self.interrupted()


class SimpleGang(FakeGang):
    """A fake gang with the given attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)
