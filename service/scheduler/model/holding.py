"""What stages hold and meshes have room for, as arrays: the memory part of a Problem."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from service.scheduler.model.spec import PipelineSpec


class Holding:
    """Sizes and limits in bytes, −1 where there is no limit."""

    spec: PipelineSpec
    inference: bool
    mesh_of_stage: np.ndarray

    @cached_property
    def activation(self) -> np.ndarray:
        return np.array([stage.activation_bytes for stage in self.spec.stages], dtype=np.int64)

    @cached_property
    def stash(self) -> np.ndarray:
        """int[stages]: of what is held from F on, the part that is held until W."""
        return np.minimum(self.whole_stash, self.activation)

    @cached_property
    def whole_stash(self) -> np.ndarray:
        """int[stages]: what is held from I to W; of a stage that recomputes it may be more than it keeps from F on."""
        return np.array([stage.weight_stash_bytes for stage in self.spec.stages], dtype=np.int64)

    @cached_property
    def rematerialised(self) -> np.ndarray:
        """int[stages]: held besides while B or I runs."""
        if self.inference:
            return np.zeros(len(self.spec.stages), dtype=np.int64)
        return np.array([stage.rematerialised_bytes for stage in self.spec.stages], dtype=np.int64)

    @cached_property
    def workspace(self) -> np.ndarray:
        """int[meshes]: the most that comes back for one backward; a mesh runs one at a time."""
        most = np.zeros(len(self.spec.meshes), dtype=np.int64)
        np.maximum.at(most, self.mesh_of_stage, self.rematerialised)
        return most

    @cached_property
    def sure_limit(self) -> np.ndarray:
        """int[meshes], −1 where there is none: what forwards fill at most in any plan, for bounds.

        The workspace counts where a mesh has one stage: see `exact_room`.
        """
        shared = np.bincount(self.mesh_of_stage, minlength=len(self.spec.meshes)) > 1
        return np.where(shared, self.activation_room, self.activation_limit)

    @property
    def exact_room(self) -> bool:
        """Whether `activation_limit` rules out nothing that fits: it keeps the workspace free all the time.

        With one stage a mesh it does: after the forward that holds the most comes a backward, which needs all of it.
        """
        shared = np.bincount(self.mesh_of_stage, minlength=len(self.spec.meshes)) > 1
        return not bool((self.workspace[shared] > 0).any())

    @cached_property
    def static_bytes(self) -> np.ndarray:
        """int[meshes]: what the stages of a mesh hold always."""
        held = np.zeros(len(self.spec.meshes), dtype=np.int64)
        np.add.at(held, self.mesh_of_stage, [stage.static_bytes for stage in self.spec.stages])
        return held

    @cached_property
    def memory_limit(self) -> np.ndarray:
        """int[meshes]: bytes for everything, −1 where there is no limit."""
        return _limits([mesh.memory_bytes for mesh in self.spec.meshes])

    @cached_property
    def activation_limit(self) -> np.ndarray:
        """int[meshes], −1 where there is none: what forwards may fill, `activation_room` less `workspace`."""
        room = self.activation_room
        return np.where(room < 0, room, np.maximum(room - self.workspace, 0))

    @cached_property
    def activation_room(self) -> np.ndarray:
        """int[meshes], −1 where there is none: never more than memory_bytes leave beside what is static."""
        limit = _limits([mesh.activation_limit_bytes for mesh in self.spec.meshes])
        left = self.memory_limit - self.static_bytes
        both = np.where(limit < 0, left, np.minimum(limit, left))
        return np.where(self.memory_limit < 0, limit, np.maximum(both, 0))

    @cached_property
    def receive_limit(self) -> np.ndarray:
        """int[meshes], −1 where there is none."""
        return _limits([mesh.receive_buffer_limit for mesh in self.spec.meshes])


def _limits(values: Sequence[int | None]) -> np.ndarray:
    return np.array([-1 if value is None else value for value in values], dtype=np.int64)
