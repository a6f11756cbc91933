"""Time limits of an attempt's phases and its profiling interval, with the environment variables that set them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

from worker.contract.job import METRICS_LINGER_S


@dataclass(frozen=True)
class Limits:
    """Every wait of an attempt, in seconds (`slot_factor` multiplies a slot's planned time).

    `start_s` is for accelerators, and for each worker to come up behind the one before it. A process that ends or a node
    that is lost is seen at once; this is for one that hangs: at load 33 on two cores a worker was not up after 93 s.
    `profile_every_s` is no wait: after it the slots of another step are reported and exposed.
    """

    start_s: float = 300.0
    prepare_s: float = 600.0
    connect_s: float = 60.0
    slot_factor: float = 20.0
    slot_floor_s: float = 30.0
    step_floor_s: float = 120.0
    checkpoint_s: float = 600.0
    linger_s: float = METRICS_LINGER_S
    profile_every_s: float = 30.0

    @classmethod
    def from_environment(cls) -> Limits:
        """SLOTLINE_PROFILE_EVERY_S, and for the others SLOTLINE_LIMIT_<NAME>."""
        values = {}
        for name, default in asdict(cls()).items():
            variable = _VARIABLE_NAMES.get(name, f"SLOTLINE_LIMIT_{name.upper()}")
            text = os.environ.get(variable, default)
            try:
                values[name] = float(text)
            except ValueError:
                raise ValueError(f"{variable} is {text!r}: give a number of seconds") from None
        return cls(**values)

    def step_s(self, makespan_s: float) -> float:
        """The limit of a whole step whose plan takes `makespan_s`."""
        return max(self.step_floor_s, self.slot_floor_s + self.slot_factor * makespan_s)


_VARIABLE_NAMES = {"profile_every_s": "SLOTLINE_PROFILE_EVERY_S"}
