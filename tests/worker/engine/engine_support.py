"""Stage graphs, hand-made programs and plain runs that the engine's tests compare with."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import nn

from worker.contract.planned import MeshProgram
from worker.contract.program import Instruction
from worker.engine.engine import Engine, engine_collectives
from worker.engine.local_stages import LocalStages
from worker.engine.optim.reduce_and_step import optimizer_of
from worker.engine.results import RunOptions
from worker.engine.routes import find_routes
from worker.transport.base import Topology
from worker.transport.local import LocalTransport


@dataclass(frozen=True)
class Edge:
    source: int
    target: int
    tensor: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    differentiable: bool = True


@dataclass
class Graph:
    stages: list[nn.Module]
    edges: tuple[Edge, ...]
    tied: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Stage(nn.Module):
    """One stage: `function(module, *inputs)` over named layers."""

    def __init__(self, inputs, outputs, function, layers, names):
        super().__init__()
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._function = function
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.original_names = names

    def forward(self, *inputs):
        return self._function(self, *inputs)


def make_stage(index, inputs, outputs, function, **layers):
    stage = Stage(inputs, outputs, function, layers, {})
    stage.original_names = {name: f"{index}.{name}" for name, _ in stage.named_parameters()}
    return stage


WIDTH, ROWS = 6, 3
SHAPE = (ROWS, WIDTH)


def linear():
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def chain(count: int, dropout: float = 0.0) -> Graph:
    """x → tanh(linear) → …; the last stage makes the output."""
    torch.manual_seed(1)
    stages = []
    for s in range(count):
        source = "input:0" if s == 0 else f"h{s - 1}"
        target = "output" if s == count - 1 else f"h{s}"
        drop = nn.Dropout(dropout)
        stages.append(
            make_stage(
                s, [source], [target], lambda m, x: (m.drop(torch.tanh(m.lin(x))),), lin=linear(), drop=drop
            )
        )
    return Graph(stages, tuple(Edge(s, s + 1, f"h{s}", SHAPE) for s in range(count - 1)))


def skips() -> Graph:
    """Four stages, a skip 0→3 and a skip 1→2 that is also used by 3: fan-out, joins, a model input twice."""
    torch.manual_seed(2)
    stages = [
        make_stage(
            0,
            ["input:0"],
            ["a", "b"],
            lambda m, x: (torch.tanh(m.l(x)), torch.sin(m.k(x))),
            l=linear(),
            k=linear(),
        ),
        make_stage(1, ["a", "input:0"], ["c"], lambda m, a, x: (torch.tanh(m.l(a)) + x,), l=linear()),
        make_stage(2, ["c", "a"], ["d"], lambda m, c, a: (m.l(c) * a,), l=linear()),
        make_stage(3, ["d", "b", "c"], ["output"], lambda m, d, b, c: (m.l(d + b) + c,), l=linear()),
    ]
    edges = (
        Edge(0, 1, "a", SHAPE),
        Edge(0, 2, "a", SHAPE),
        Edge(0, 3, "b", SHAPE),
        Edge(1, 2, "c", SHAPE),
        Edge(1, 3, "c", SHAPE),
        Edge(2, 3, "d", SHAPE),
    )
    return Graph(stages, edges)


def two_branches() -> Graph:
    """0 → {1, 2} → 3, with an integer tensor beside the floating one on 0→2."""
    torch.manual_seed(3)

    def first(m, x):
        h = torch.tanh(m.l(x))
        return h, h.argmax(-1)

    stages = [
        make_stage(0, ["input:0"], ["h", "i"], first, l=linear()),
        make_stage(1, ["h"], ["p"], lambda m, h: (torch.relu(m.l(h)),), l=linear()),
        make_stage(
            2,
            ["h", "i"],
            ["q"],
            lambda m, h, i: (m.l(h) + m.e(i),),
            l=linear(),
            e=nn.Embedding(WIDTH, WIDTH).double(),
        ),
        make_stage(3, ["p", "q"], ["output"], lambda m, p, q: (m.l(p * q),), l=linear()),
    ]
    edges = (
        Edge(0, 1, "h", SHAPE),
        Edge(0, 2, "h", SHAPE),
        Edge(0, 2, "i", (ROWS,), torch.int64, False),
        Edge(1, 3, "p", SHAPE),
        Edge(2, 3, "q", SHAPE),
    )
    return Graph(stages, edges)


def tied_chain() -> Graph:
    """Three stages; the weight of the first is used again, transposed, in the last."""
    torch.manual_seed(4)
    shared = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH**0.5)
    stages = [
        make_stage(0, ["input:0"], ["a"], lambda m, x: (torch.tanh(x @ m.w),), w=shared),
        make_stage(1, ["a"], ["b"], lambda m, a: (torch.tanh(m.l(a)),), l=linear()),
        make_stage(2, ["b"], ["output"], lambda m, b: (b @ m.w.T,), w=shared),
    ]
    stages[2].original_names = {"w": "0.w"}
    return Graph(stages, (Edge(0, 1, "a", SHAPE), Edge(1, 2, "b", SHAPE)), {"0.w": (0, 2)})


def squared_error(output, target):
    return ((output - target) ** 2).mean()


def batch(microbatches, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    inputs = [(torch.randn(SHAPE, generator=generator, dtype=dtype),) for _ in range(microbatches)]
    targets = [torch.randn(SHAPE, generator=generator, dtype=dtype) for _ in range(microbatches)]
    return inputs, targets


class Plain:
    """The unsplit model: all stages in one process, microbatches accumulated one after the other."""

    def __init__(self, graph: Graph, optimizer=None, clip=None):
        self.graph = copy.deepcopy(graph)
        self.parameters = {}
        for stage in self.graph.stages:
            for local, parameter in stage.named_parameters():
                self.parameters.setdefault(stage.original_names[local], parameter)
        self.optimizer = optimizer(list(self.parameters.values())) if optimizer else None
        self.clip = clip

    def step(self, inputs, targets):
        for parameter in self.parameters.values():
            parameter.grad = None
        losses = []
        for arguments, target in zip(inputs, targets, strict=True):
            tensors = {f"input:{k}": value for k, value in enumerate(arguments)}
            for stage in self.graph.stages:
                tensors.update(
                    zip(stage.outputs, stage(*(tensors[name] for name in stage.inputs)), strict=True)
                )
            loss = squared_error(tensors["output"], target)
            (loss / len(inputs)).backward()
            losses.append(loss.item())
        gradients = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        self.norm = None
        if self.clip is not None:
            self.norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clip).item()
        if self.optimizer:
            self.optimizer.step()
        return losses, gradients


def serial_programs(graph: Graph, mesh_of_stage, microbatches, split=False, order=None):
    """Correct but slow programs: all forwards, then all backwards, one microbatch after the other."""
    routes = find_routes(graph.edges, mesh_of_stage)
    programs = defaultdict(list)
    events = defaultdict(int)

    def emit(mesh, op, lane, wait=(), **fields):
        event = events[mesh]
        events[mesh] += 1
        programs[mesh].append(Instruction(op, lane, wait=tuple(wait), record=event, **fields))
        return event

    def transfer(route, m, forward, produced):
        source, target = route.source_mesh, route.target_mesh
        mine, yours = (route.source, route.consumers[0])
        if not forward:
            source, target, mine, yours = target, source, yours, mine
        kind = "F" if forward else "B"
        emit(
            source,
            f"SEND_{kind}",
            f"send:{target}",
            [produced],
            stage=mine,
            microbatch=m,
            edge=route.index,
            peer=target,
        )
        return emit(
            target,
            f"RECV_{kind}",
            f"recv:{source}",
            [],
            stage=yours,
            microbatch=m,
            edge=route.index,
            peer=source,
        )

    for m in order or range(microbatches):
        arrived = defaultdict(list)
        for s in range(len(graph.stages)):
            event = emit(mesh_of_stage[s], "F", "compute", arrived[s], stage=s, microbatch=m)
            for route in routes.values():
                if route.source == s:
                    for consumer in [transfer(route, m, True, event)]:
                        arrived[route.consumers[0]].append(consumer)
    for m in order or range(microbatches):
        arrived = defaultdict(list)
        pending = {index: set(route.consumers) for index, route in routes.items()}
        for s in reversed(range(len(graph.stages))):
            event = emit(
                mesh_of_stage[s], "I" if split else "B", "compute", arrived[s], stage=s, microbatch=m
            )
            for index, route in routes.items():
                if s in pending[index]:
                    pending[index].discard(s)
                    if not pending[index]:
                        arrived[route.source].append(transfer(route, m, False, event))
            if split:
                emit(mesh_of_stage[s], "W", "compute", [], stage=s, microbatch=m)
    for mesh in dict.fromkeys(mesh_of_stage):
        emit(mesh, "REDUCE", "compute")
        emit(mesh, "STEP", "compute")
    return {mesh: tuple(program) for mesh, program in programs.items()}


class Recorder(torch.optim.SGD):
    """SGD that remembers the gradients it was given."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr=lr)
        self.seen = []

    def step(self, closure=None):
        self.seen.append(
            [None if p.grad is None else p.grad.clone() for g in self.param_groups for p in g["params"]]
        )
        return super().step(closure)


def make_engine(
    transport, program, graph, mesh_of_stage, *, optimizer=None, options=None, tensor=None, **given
):
    """An engine of `program` for the stages of a graph that the transport's mesh runs; `optimizer` makes one of
    parameters."""
    options = options or RunOptions()
    own = {s: graph.stages[s] for s, mesh in enumerate(mesh_of_stage) if mesh == transport.mesh}
    if optimizer is not None:
        given["optimizer"] = optimizer_of(own, lambda parameters, _: optimizer(parameters), options.device)
    return Engine(
        program,
        LocalStages(own, mesh_of_stage, graph.edges, graph.tied, tensor),
        engine_collectives(transport, program, mesh_of_stage, graph.tied, options),
        options=options,
        **given,
    )


class LocalPipeline:
    """All engines of a graph in this process, one thread each. `times`: what `times_of` gives."""

    def __init__(
        self,
        graph,
        mesh_of_stage,
        programs,
        microbatches,
        *,
        optimizer=Recorder,
        workers=1,
        loss=None,
        recomputed=(),
        times=None,
        **options,
    ):
        meshes = tuple(dict.fromkeys(mesh_of_stage))
        transports = LocalTransport.group(Topology(meshes, workers))
        self.engines = {}
        for (mesh, worker), transport in transports.items():
            mine = copy.deepcopy(graph)
            self.engines[mesh, worker] = make_engine(
                transport,
                MeshProgram(
                    tuple(programs[mesh]),
                    microbatches,
                    recomputed=recomputed
                    if isinstance(recomputed, dict)
                    else dict.fromkeys(recomputed, "whole"),
                    **({} if times is None else times[mesh]),
                ),
                mine,
                mesh_of_stage,
                loss=loss or squared_error,
                optimizer=optimizer,
                options=RunOptions(**options),
            )
        self.each(lambda key, engine: engine.connect())

    def each(self, function):
        """Call function(key, engine) for all engines at once; results by key; raises the first error."""
        results, errors = {}, {}

        def call(key, engine):
            try:
                results[key] = function(key, engine)
            except BaseException as error:
                errors[key] = error

        threads = [threading.Thread(target=call, args=item) for item in self.engines.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.errors = errors
        if errors:
            raise next(iter(errors.values()))
        return results

    def step(self, step, batches):
        """`batches[worker]` = (inputs, targets)."""
        return self.each(lambda key, engine: engine.run_step(step, *batches[key[1]]))

    def gradients(self):
        """What each parameter's optimizer saw last, by name."""
        found = {}
        for engine in self.engines.values():
            update = engine._update
            names = [name for name, p in update.parameters.items() if p.requires_grad]
            if update.optimizer is not None:
                found.update(zip(names, update.optimizer.seen[-1], strict=True))
        return found

    def close(self):
        return [engine.close() for engine in self.engines.values()]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def times_of(plan):
    """The planned times of every mesh's instructions, as an engine takes them."""
    from worker.contract.planned import planned_seconds, planned_starts

    plan = plan.model_dump(mode="json")
    names = sorted({s["stage"] for s in plan["slots"]}, key=lambda name: int(name[1:]))
    lengths, starts = planned_seconds(plan, names), planned_starts(plan, names)
    return {mesh: {"planned_s": lengths[mesh], "planned_starts_s": starts[mesh]} for mesh in lengths}


def planned(graph: Graph, mesh_of_stage, microbatches, schedule, costs=None, **spec):
    """The scheduler's plan and programs of a graph; every cost is one second unless `costs` says otherwise."""
    from service.scheduler.planner import make_plan
    from service.scheduler.problem.spec import PipelineSpec
    from worker.contract.program import program_from_json

    stage_costs, edge_cost = costs or ([(1.0, 1.0, 1.0)] * len(graph.stages), 0.5)
    description = {
        "microbatches": microbatches,
        "meshes": [{"name": mesh} for mesh in dict.fromkeys(mesh_of_stage)],
        "stages": [
            {
                "name": f"s{s}",
                "mesh": mesh,
                "forward_s": f,
                "backward_input_s": i,
                "backward_weight_s": w,
                "activation_bytes": 1,
                "weight_stash_bytes": 0,
            }
            for s, (mesh, (f, i, w)) in enumerate(zip(mesh_of_stage, stage_costs, strict=True))
        ],
        "edges": [
            {
                "source": f"s{e.source}",
                "target": f"s{e.target}",
                "tensor": e.tensor,
                "forward_s": edge_cost,
                "backward_s": edge_cost,
            }
            for e in graph.edges
        ],
        "schedule": schedule,
        **spec,
    }
    plan = make_plan(PipelineSpec.model_validate(description), budget_s=0.5)
    programs = {
        mesh: program_from_json(i if isinstance(i, dict) else i.to_json() for i in program)
        for mesh, program in plan.programs.items()
    }
    return plan, programs


def random_graph(rng) -> Graph:
    """A stage graph of 2 to 6 stages drawn from `rng` (random.Random): joins, fan-out, skips, one sink."""
    count = rng.randint(2, 6)
    made = [[f"t{s}.{k}" for k in range(rng.choice([1, 1, 2]))] for s in range(count - 1)]
    inputs = [[] for _ in range(count)]
    for s in range(1, count):
        earlier = [(u, name) for u in range(s) for name in made[u]]
        inputs[s] = sorted(rng.sample(earlier, min(len(earlier), rng.choice([1, 1, 2, 3]))))
    used = {name for names in inputs for _, name in names}
    for u in range(count - 1):
        for name in made[u]:
            if name not in used:
                s = rng.randint(u + 1, count - 1)
                inputs[s] = sorted({*inputs[s], (u, name)})
    edges = [Edge(u, s, name, SHAPE) for s in range(count) for u, name in inputs[s]]
    edges.sort(key=lambda e: (e.source, e.target, e.tensor))

    def function(m, *tensors):
        total = sum(torch.tanh(layer(t)) for layer, t in zip(m.layers, tensors, strict=True))
        return tuple(total * (k + 1) + torch.sin(total) for k in range(len(m.outputs)))

    torch.manual_seed(rng.randint(0, 2**31))
    stages = []
    for s in range(count):
        names = [name for _, name in inputs[s]]
        if s == 0 or rng.random() < 0.3:
            names = ["input:0", *names]
        layers = nn.ModuleList(linear() for _ in names)
        outputs = ["output"] if s == count - 1 else made[s]
        stages.append(make_stage(s, names, outputs, function, layers=layers))
    return Graph(stages, tuple(edges))


def merged_state(pipeline):
    """What a checkpoint of all meshes would hold, in memory of its own."""
    merged = {"parameters": {}, "buffers": {}, "optimizer": {}, "optimizer_groups": []}
    for engine in pipeline.engines.values():
        state = copy.deepcopy(engine.state())
        for kind in ("parameters", "buffers", "optimizer"):
            merged[kind].update(state[kind])
        merged["optimizer_groups"] += state["optimizer_groups"]
        merged |= {kind: state[kind] for kind in ("lr_schedule", "loss_scale")}
    return merged
