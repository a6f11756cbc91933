"""Proves message order and deadlock freedom worker by worker, for meshes with several workers and reshardings.

`check_programs` takes a mesh for one party. Here each worker runs its mesh's program by itself, and a resharded transfer
is the messages of its plan. Proven are two things: on each lane both ends of each ordered pair of workers have their
messages in one order (other lanes have tags of their own); and no instruction, message or all-reduce waits for another in
a circle. Every wait is taken as stricter than it is: an instruction begins when the one before it on its lane has
ended, and a worker sends one message at a time and receives one, in the plan's order.
Tensor-parallel collectives add no circle: `check_programs` takes a computation as one event of a mesh that begins when
all its workers have come to it, and a worker waits in such a collective for no more than that.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.scheduler.programs.decode import PlanError
from worker.contract.program import SEND_OPS, TRANSFER_OPS, Instruction

if TYPE_CHECKING:
    from service.scheduler.resharding.resharding_plan import PlannedMessage, PlannedResharding


ReshardingPlans = Mapping[tuple[int, bool], "PlannedResharding"]
_TransferKey = tuple[int, bool, int]
"""(edge, True for the gradient, microbatch)."""


def check_messages(
    programs: Mapping[str, Sequence[Instruction]],
    plans: ReshardingPlans,
    sizes: Mapping[str, int],
    forward_only: Collection[int] = (),
) -> None:
    """Raise PlanError, naming worker and instruction, unless the workers of all meshes (`sizes`) finish.

    `plans` are the resharded transfers; all others go worker by worker. The tensors of the edges `forward_only` have no
    gradient, as a mask: programs have a slot for it, in which workers send nothing.
    """
    parties = [
        _Worker(f"{mesh}/{w}", mesh, w, program, forward_only)
        for mesh, program in programs.items()
        for w in range(sizes[mesh])
    ]
    _check_message_order(parties, plans, sizes)
    _check_no_deadlock(parties, plans, sizes)


@dataclass(frozen=True)
class _Worker:
    """A worker, which runs the program of its mesh."""

    name: str
    mesh: str
    number: int
    program: Sequence[Instruction]
    forward_only: Collection[int]

    def transfers(self) -> Iterable[tuple[int, Instruction, _TransferKey]]:
        """Its transfers in program order: (index in the program, instruction, key)."""
        for index, instruction in enumerate(self.program):
            op, edge = instruction.op, instruction.edge
            backward = op.endswith("B")
            if op in TRANSFER_OPS and not (backward and edge in self.forward_only):
                yield index, instruction, (edge, backward, instruction.microbatch)


def _messages_of_worker(
    party: _Worker,
    instruction: Instruction,
    transfer: _TransferKey,
    plans: ReshardingPlans,
    sizes: Mapping[str, int],
) -> list[tuple[int, str, str]]:
    """(number, sender, receiver) of this worker's messages of a transfer."""
    plan = plans.get(transfer[:2])
    if plan is None:
        if sizes[party.mesh] != sizes[instruction.peer]:
            raise PlanError(
                f"worker {party.name}: {instruction} goes between meshes of {sizes[party.mesh]} and "
                f"{sizes[instruction.peer]} workers, and has no resharding"
            )
        ends = party.name, f"{instruction.peer}/{party.number}"
        return [(0, *(ends if instruction.op in SEND_OPS else reversed(ends)))]
    return [
        (number, message.sender, message.receiver)
        for number, message in enumerate(plan.messages)
        if party.name in (message.sender, message.receiver)
    ]


def _check_message_order(
    parties: Sequence[_Worker], plans: ReshardingPlans, sizes: Mapping[str, int]
) -> None:
    """Raise PlanError unless the sender and the receiver of each lane and pair of workers order their messages alike."""
    sent: dict[tuple[str, ...], list[tuple[_TransferKey, int]]] = defaultdict(list)
    received: dict[tuple[str, ...], list[tuple[_TransferKey, int]]] = defaultdict(list)
    for party in parties:
        for _, instruction, transfer in party.transfers():
            lane = (
                (party.mesh, instruction.peer)
                if instruction.op in SEND_OPS
                else (instruction.peer, party.mesh)
            )
            for number, sender, receiver in _messages_of_worker(party, instruction, transfer, plans, sizes):
                (sent if sender == party.name else received)[*lane, sender, receiver].append(
                    (transfer, number)
                )
    for pair in sorted({*sent, *received}):
        if sent[pair] == received[pair]:
            continue
        both = zip(sent[pair], received[pair], strict=False)
        at = next((i for i, (a, b) in enumerate(both) if a != b), min(len(sent[pair]), len(received[pair])))
        sent_text, received_text = (
            _describe_message(side[at : at + 1]) for side in (sent[pair], received[pair])
        )
        raise PlanError(
            f"message {at} from worker {pair[2]} to worker {pair[3]} is sent as {sent_text} but received as "
            f"{received_text}: both ends must use one order"
        )


def _describe_message(message: Sequence[tuple[_TransferKey, int]]) -> str:
    if not message:
        return "nothing"
    ((edge, backward, microbatch), number), *_ = message
    tensor = "gradient" if backward else "tensor"
    return f"part {number} of the {tensor} of edge {edge}, microbatch {microbatch}"


class _WaitGraph:
    """A graph of waits between starts and ends of instructions; each node has a number and a text."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._followers: list[list[int]] = []
        self._missing: list[int] = []

    def node(self, text: str) -> int:
        self.texts.append(text)
        self._followers.append([])
        self._missing.append(0)
        return len(self.texts) - 1

    def wait(self, node: int, before: int) -> None:
        self._followers[before].append(node)
        self._missing[node] += 1

    def stuck(self) -> list[int]:
        """The nodes that never happen."""
        missing = list(self._missing)
        ready = deque(node for node, count in enumerate(missing) if not count)
        while ready:
            for node in self._followers[ready.popleft()]:
                missing[node] -= 1
                if not missing[node]:
                    ready.append(node)
        return [node for node, count in enumerate(missing) if count]


def _check_no_deadlock(parties: Sequence[_Worker], plans: ReshardingPlans, sizes: Mapping[str, int]) -> None:
    waits = _WaitGraph()
    starts: dict[str, list[int]] = {}
    ends: dict[str, list[int]] = {}
    place: dict[tuple[str, _TransferKey, bool], int] = {}
    sums: list[tuple[int, int]] = []
    for party in parties:
        starts[party.name], ends[party.name] = _add_program(waits, party)
        for index, instruction in enumerate(party.program):
            if instruction.op == "REDUCE":
                sums.append((starts[party.name][index], ends[party.name][index]))
        for index, instruction, transfer in party.transfers():
            place[party.name, transfer, instruction.op in SEND_OPS] = index
    all_reduce = waits.node("the sum over all workers")
    for start, end in sums:
        waits.wait(all_reduce, start)
        waits.wait(end, all_reduce)

    def of(worker: str, transfer: _TransferKey, sends: bool) -> tuple[int, int]:
        index = place[worker, transfer, sends]
        return starts[worker][index], ends[worker][index]

    for party in parties:
        for index, instruction, transfer in party.transfers():
            plan = plans.get(transfer[:2])
            if plan is None and instruction.op in SEND_OPS:
                send_start, send_end = starts[party.name][index], ends[party.name][index]
                receive_start, receive_end = of(f"{instruction.peer}/{party.number}", transfer, False)
                waits.wait(send_end, receive_start)
                waits.wait(receive_end, send_start)
            elif plan is not None and instruction.op in SEND_OPS and party.number == 0:
                sides = {worker.name: worker.source for worker in plan.workers}
                _add_resharding(
                    waits, plan.messages, {w: of(w, transfer, source) for w, source in sides.items()}
                )
    if stuck := waits.stuck():
        raise PlanError(f"the workers wait for each other for ever, among others at {waits.texts[stuck[0]]}")


def _add_program(waits: _WaitGraph, party: _Worker) -> tuple[list[int], list[int]]:
    """Starts and ends of a worker's instructions, with the waits of its lanes and events."""
    starts, ends = [], []
    last: dict[str, int] = {}
    recorder: dict[int, int] = {}
    for instruction in party.program:
        start, end = (
            waits.node(f"{end} of {instruction} on worker {party.name}") for end in ("the start", "the end")
        )
        waits.wait(end, start)
        if instruction.lane in last:
            waits.wait(start, last[instruction.lane])
        for event in instruction.wait:
            if event not in recorder:
                raise PlanError(
                    f"worker {party.name}: {instruction} waits for event {event}, which nothing before it records"
                )
            waits.wait(start, recorder[event])
        last[instruction.lane] = end
        if instruction.record is not None:
            recorder[instruction.record] = end
        starts.append(start)
        ends.append(end)
    return starts, ends


def _add_resharding(
    waits: _WaitGraph, messages: Sequence[PlannedMessage], part_of: Mapping[str, tuple[int, int]]
) -> None:
    """The messages of one transfer; `part_of`: start and end of each worker's instruction."""
    last: dict[tuple[str, bool, bool], int] = {}
    nodes = [
        waits.node(f"a message from worker {message.sender} to worker {message.receiver}")
        for message in messages
    ]
    for message, node in zip(messages, nodes, strict=True):
        for before in message.after:
            waits.wait(node, nodes[before])
        for worker, sends in ((message.sender, True), (message.receiver, False)):
            start, end = part_of[worker]
            waits.wait(node, start)
            waits.wait(end, node)
            lane = worker, sends, message.local
            if lane in last:
                waits.wait(node, last[lane])
            last[lane] = node
