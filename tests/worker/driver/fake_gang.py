"""A gang without Ray: calls are made as the driver's gang makes them, and answered by whatever `remote` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from worker.driver.gang.gang import Gang
from worker.driver.gang.phases import Phase


class FakeActor:
    """An actor whose calls are answered by the functions of these names; what they return stands for Ray's reference."""

    def __init__(self, **answers: Callable[..., Any]) -> None:
        self.answers = answers
        self.call = SimpleNamespace(remote=self._answer)

    def _answer(self, method: str, *given: Any, **named: Any) -> Any:
        return self.answers[method](*given, **named)


class FakeGang:
    """The calls of worker/driver/gang/gang.py; subclasses have `workers`, and `wait` where answers come later."""

    interrupted: Callable[[], None] = staticmethod(lambda: None)
    """Called where the driver's gang looks whether the attempt is to end; may raise."""

    taken_over = ()

    ask, call, expect_steps = Gang.ask, Gang.call, Gang.expect_steps

    def wait(self, refs: Sequence[Any], **_: Any) -> list[Any]:
        return list(refs)

    def raise_if_interrupted(self, phase: Phase) -> None:
        self.interrupted()


class SimpleGang(FakeGang):
    """A fake gang with the given attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)
