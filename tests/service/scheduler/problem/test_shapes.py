"""Which placements are which shape, by small ones."""

import pytest

from service.scheduler.problem import spec as problem_spec
from service.scheduler.problem.spec_checks import load_spec
from tests.service.scheduler.specs import chain


@pytest.mark.parametrize(
    ("meshes", "found"),
    [
        ([0, 1, 2], {"one_stage_per_mesh"}),
        ([2, 1, 0], {"one_stage_per_mesh"}),
        ([0, 1, 0, 1], {"is_looped"}),
        ([0, 1, 0, 1, 0, 1], {"is_looped"}),
        ([0, 1, 0, 1, 0], set()),
        ([0, 1, 1, 0, 0, 1], set()),
        ([0, 1, 1, 0], {"is_v_shaped"}),
        ([0, 1, 2, 2, 1, 0], {"is_v_shaped"}),
        ([0, 1, 1, 0, 0], set()),
        ([0, 0], {"is_looped", "is_v_shaped"}),
        ([0, 0, 0], {"is_looped"}),
        ([0], {"one_stage_per_mesh"}),
    ],
)
def test_a_placement_is_of_the_shapes_that_fit_it(meshes, found):
    spec = load_spec(chain(len(meshes), 2, meshes=meshes, schedule="auto"))
    shapes_of = ("one_stage_per_mesh", "is_looped", "is_v_shaped")
    assert {name for name in shapes_of if getattr(problem_spec, name)(spec)} == found
    assert problem_spec.is_chain(spec)


def test_a_skip_is_no_chain_and_an_edge_back_is_no_shape_of_rounds():
    skip = load_spec(chain(4, 2, meshes=[0, 1, 0, 1], skips=((0, 2),), schedule="auto"))
    assert not problem_spec.is_chain(skip) and problem_spec.is_looped(skip)
    data = chain(4, 2, meshes=[0, 1, 0, 1], schedule="auto")
    data["edges"][1].update(source="s2", target="s1")
    back = load_spec(data)
    assert not problem_spec.is_chain(back) and not problem_spec.is_looped(back)
    data["stages"][2]["mesh"], data["stages"][3]["mesh"] = "m1", "m0"
    assert not problem_spec.is_v_shaped(load_spec(data))
