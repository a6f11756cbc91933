"""What the kernels are told: named tuples of flat arrays, and how tasks are numbered.

A kind is one operation of the step (a stage's F, its B or I, its W; a transfer's two directions), a task is a
kind of one microbatch: task = kind * microbatches + microbatch. The kinds of stage s are OPS * s + FORWARD,
+ BACKWARD (B, or I where it is split) and + WEIGHT; the kinds of transfers follow those of all stages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

OPS = 3
FORWARD, BACKWARD, WEIGHT = 0, 1, 2


class Rows(NamedTuple):
    """A list of lists: row i is values[pointer[i]:pointer[i + 1]]."""

    pointer: np.ndarray
    values: np.ndarray


class Tasks(NamedTuple):
    """The tasks of a problem: what they wait for, how long they last (seconds) and what they occupy."""

    microbatches: int
    stages: int
    meshes: int
    resource_count: int
    exists: np.ndarray  # bool[tasks]
    duration: np.ndarray  # float[tasks]
    missing: np.ndarray  # int32[tasks]: how many others each waits for
    dependents: Rows  # of kinds
    needs: Rows  # of kinds
    resources: np.ndarray  # int[kinds, 2], −1 for none; resource p < meshes is the compute lane of mesh p
    receiver: np.ndarray  # int[kinds]: mesh at which a kind ends
    kinds_of_mesh: Rows  # compute kinds


class Limits(NamedTuple):
    """What compute lanes may hold (bytes of stages and meshes, −1: no limit) and how many microbatches."""

    activation: np.ndarray  # of each stage
    stash: np.ndarray
    activation_limit: np.ndarray  # of each mesh
    in_flight_cap: np.ndarray  # of each stage: between F and B
    source_cap: np.ndarray  # of each stage: between F and the end of its whole backward


class Receives(NamedTuple):
    """Receive buffers: how many each mesh has (−1: no limit), and in which order transfers may take them."""

    limit: np.ndarray  # int[meshes]
    by_first_use: Rows  # of meshes: transfer tasks
    rank: np.ndarray  # int[tasks]: place in its row
