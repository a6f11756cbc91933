"""The csv schedule: compute orders that a user gives mesh by mesh in torch's notation (`0F0,0F1,0I0,0W0`).

Reads torch's files too: empty cells are idle slots, a pair `(0F4;3B1)OVERLAP_F_B` is its two actions, and
transfer and parameter actions are left to the scheduler. Raises SpecError, naming the cell, unless every action
is listed once.
"""

from __future__ import annotations

import csv
import io
import re

import numpy as np

from service.scheduler.kernels import BACKWARD, FORWARD, WEIGHT
from service.scheduler.problem.problem import Problem
from service.scheduler.problem.spec import PipelineSpec, SpecError

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAPPED_PAIR = re.compile(r"\((\d+[FBIW]\d+);(\d+[FBIW]\d+)\)OVERLAP_F_B")
_NON_COMPUTE_ACTION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_OPERATION = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHT}


def csv_lanes(problem: Problem) -> list[np.ndarray]:
    """Tasks of `spec.orders`; raises SpecError on an action that does not belong there."""
    orders = _checked_orders(problem.spec)
    return [
        np.array(
            [
                problem.task(stage, _OPERATION[letter], microbatch)
                for stage, letter, microbatch in parse_actions(problem.spec, mesh.name, orders[mesh.name])
            ],
            dtype=np.int64,
        )
        for mesh in problem.spec.meshes
    ]


def fused_of_orders(spec: PipelineSpec) -> tuple[np.ndarray, bool]:
    """(bool[stages, microbatches], inference): which backwards are one B, and whether there are none at all.

    Raises SpecError unless every action of every stage is there exactly once.
    """
    orders = _checked_orders(spec)
    counts = np.zeros((len(spec.stages), 4, spec.microbatches), dtype=np.int64)
    for mesh in spec.meshes:
        for stage, letter, microbatch in parse_actions(spec, mesh.name, orders[mesh.name]):
            counts[stage, "FBIW".index(letter), microbatch] += 1
    inference = not counts[:, 1:].any()
    forward, full, inputs, weights = (counts[:, i] for i in range(4))
    for stage, microbatch in np.argwhere(forward != 1).tolist():
        raise SpecError(
            f"orders list {stage}F{microbatch} {forward[stage, microbatch]} times: list it exactly once"
        )
    if not inference:
        whole = (full == 1) & (inputs == 0) & (weights == 0)
        parts = (full == 0) & (inputs == 1) & (weights == 1)
        for stage, microbatch in np.argwhere(~(whole | parts)).tolist():
            b, i, w = (int(counts[stage, k, microbatch]) for k in (1, 2, 3))
            raise SpecError(
                f"orders list the backward of stage {stage}, microbatch {microbatch} as B x{b}, I x{i}, W x{w}: "
                "list either one B, or one I and one W"
            )
    return full == 1, inference


def parse_actions(spec: PipelineSpec, mesh: str, cells: list[str]) -> list[tuple[int, str, int]]:
    """(stage, letter, microbatch) of the cells of one mesh; empty cells are idle slots and are skipped."""
    actions = []
    for cell in cells:
        text = cell.strip()
        if not text:
            continue
        match = _ACTION.fullmatch(text)
        if match is None:
            raise SpecError(f"orders of mesh {mesh!r} hold {cell!r}: write actions like 0F0, 0B0, 0I0 or 0W0")
        stage, microbatch = int(match[1]), int(match[3])
        if stage >= len(spec.stages) or spec.stages[stage].mesh != mesh:
            here = [str(i) for i, s in enumerate(spec.stages) if s.mesh == mesh]
            raise SpecError(
                f"orders of mesh {mesh!r} hold {text}, but only stages {', '.join(here)} are there"
            )
        if microbatch >= spec.microbatches:
            raise SpecError(
                f"orders of mesh {mesh!r} hold {text}, but there are {spec.microbatches} microbatches: "
                f"use 0 to {spec.microbatches - 1}"
            )
        actions.append((stage, match[2], microbatch))
    return actions


def orders_from_csv(spec: PipelineSpec, text: str) -> dict[str, list[str]]:
    """The `orders` of a CSV text with one row for each mesh, in the order of `spec.meshes`.

    Reads torch's files: empty cells are idle slots, a fused pair `(0F4;3B1)OVERLAP_F_B` is its two
    actions, and transfers and parameter actions are left to the scheduler.
    """
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]
    while rows and not any(rows[-1]):
        rows.pop()
    if len(rows) != len(spec.meshes):
        raise SpecError(
            f"the CSV has {len(rows)} rows, the spec {len(spec.meshes)} meshes: give one row for each mesh"
        )
    return {
        mesh.name: [action for cell in row for action in _compute_actions(cell)]
        for mesh, row in zip(spec.meshes, rows, strict=True)
    }


def _compute_actions(cell: str) -> list[str]:
    pair = _OVERLAPPED_PAIR.fullmatch(cell)
    if pair is not None:
        return [pair[1], pair[2]]
    return [] if not cell or _NON_COMPUTE_ACTION.fullmatch(cell) else [cell]


def _checked_orders(spec: PipelineSpec) -> dict[str, list[str]]:
    if spec.orders is None:
        raise SpecError("schedule 'csv' needs orders: give the actions of every mesh")
    names = {mesh.name for mesh in spec.meshes}
    if unknown := sorted(set(spec.orders) - names):
        raise SpecError(
            f"orders name mesh {unknown[0]!r}, which does not exist: use {', '.join(sorted(names))}"
        )
    if missing := sorted(names - set(spec.orders)):
        raise SpecError(f"orders leave out mesh {missing[0]!r}: give its actions")
    return spec.orders
