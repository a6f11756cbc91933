"""Which parameters of a mesh are one object, and what is summed over whom for those that are not."""

import torch
from torch import nn

from tests.worker.engine.engine_support import LocalPipeline, serial_programs, tied_chain
from worker.engine.local_stages import LocalStages, tie_local_parameters
from worker.engine.optim.reduce_and_step import bucket_candidates
from worker.parallel.process_groups import reduce_groups
from worker.transport.base import Topology


def stage(**names: str) -> nn.Module:
    """A stage with a parameter of its own for each `local=original`; a dot in a local name is written `__`."""
    module = nn.Module()
    module.original_names = {}
    for local, original in names.items():
        *path, attribute = local.split("__")
        holder = module
        for part in path:
            if not hasattr(holder, part):
                setattr(holder, part, nn.Module())
            holder = getattr(holder, part)
        setattr(holder, attribute, nn.Parameter(torch.randn(2)))
        module.original_names[".".join([*path, attribute])] = original
    return module


def test_stages_of_one_mesh_hold_a_parameter_that_they_share_once_and_the_first_ones_value():
    first = stage(emb__weight="emb", own="first.own")
    last = stage(own="last.own", head__out__weight="emb", head__out__bias="bias")
    value = first.emb.weight.detach().clone()
    others = [last.own, last.head.out.bias, first.own]
    tie_local_parameters({0: first, 3: last}, {"emb": (0, 1, 3), "elsewhere": (1, 2)})
    assert last.head.out.weight is first.emb.weight and torch.equal(first.emb.weight, value)
    assert [last.own, last.head.out.bias, first.own] == others, "what only looks alike stays apart"
    assert [name for name, _ in last.named_parameters()] == ["own", "head.out.weight", "head.out.bias"]


def test_a_parameter_that_one_stage_uses_twice_is_one_too():
    both = stage(a="w", b="w", c="other")
    tie_local_parameters({1: both}, {"w": (1, 2)})
    assert both.a is both.b and both.c is not both.a


def test_only_those_sum_who_have_something_to_sum_with():
    alone = reduce_groups(Topology(("m0",), 1), {"w": (0, 1)}, ["m0", "m0"])
    assert alone == {}
    topology = Topology(("m0", "m1", "m2"), 2)

    def ranks(*places: tuple[str, int]) -> tuple[int, ...]:
        return tuple(topology.rank(mesh, worker) for mesh, worker in places)

    groups = reduce_groups(topology, {"w": (0, 2), "local": (1, 3)}, ["m0", "m1", "m2", "m1"])
    assert groups == {
        **{f"workers/{mesh}": ranks((mesh, 0), (mesh, 1)) for mesh in topology.meshes},
        **{f"meshes/{w}": ranks(("m0", w), ("m1", w), ("m2", w)) for w in range(2)},
        **{f"tied/w/{w}": ranks(("m0", w), ("m2", w)) for w in range(2)},
    }


def candidates(engine, graph, mesh_of_stage):
    own = LocalStages(engine.stages, mesh_of_stage, graph.edges, graph.tied)
    return bucket_candidates(own, engine._collectives)


def test_workers_sum_early_what_is_trained_and_of_their_mesh_alone():
    """A tied parameter is summed over its meshes first, and what is not trained has nothing to sum."""
    graph, meshes = tied_chain(), ["m0", "m1", "m2"]
    graph.stages[1].l.bias.requires_grad_(False)
    programs = serial_programs(graph, meshes, 2)
    with LocalPipeline(graph, meshes, programs, 2, workers=2) as pipeline:
        found = {mesh: candidates(pipeline.engines[mesh, 0], graph, meshes) for mesh in meshes}
    assert found["m0"] == found["m2"] == []
    (weight,) = found["m1"]
    assert (weight.name, weight.stages, weight.size_bytes) == ("1.l.weight", (1,), 6 * 6 * 8)
    with LocalPipeline(graph, meshes, programs, 2) as pipeline:
        assert not any(candidates(engine, graph, meshes) for engine in pipeline.engines.values())
