"""The JSON of dataclasses at borders, byte for byte as releases before wrote it, and what reading refuses."""

from __future__ import annotations

import json

import pytest

from worker.contract.codec import from_json, to_json
from worker.contract.costs import LinearCost, MeshUpdate, UpdateCosts
from worker.contract.planned import ModelSignature
from worker.contract.profile import LayerCost, LayerEdge, LayerProfile
from worker.contract.program import Instruction
from worker.contract.tasks import (
    ExportRequest,
    RemovalRequest,
    RemovalResult,
    removal_requests_from_json,
    removal_requests_json,
    removal_result_from_json,
)

NORMED = LayerCost(
    *("a", 1.0, 2.0, 0.5, 64, 16, 8),
    parameters=("a.w",),
    buffers=("a.b",),
    norm_sums=(("forward_s", 2, 32),),
)
SPLIT = LayerCost(
    *("b", 1, 2.5, 0.5, 64, 16, 8), backward_s=2.75, flops=12, sums=(("forward_s", "reduce", 1, 64),)
)
PROFILE = LayerProfile(
    (NORMED, SPLIT),
    (LayerEdge(0, 1, "relu", 128, True, shape=(4, 8)),),
    "cpu",
    "[4, 8]",
    {"a.w": 8},
    buffer_sizes={"a.b": 4},
    updated_buffers=frozenset({"a.b"}),
)
COMPILED = LayerProfile(
    *((SPLIT,), (), "cuda", "[4]", {}, ("b.w",)),
    checkpointed=frozenset({"b"}),
    compiled=frozenset({"b", "a"}),
    split_parameters=frozenset({"x", "w"}),
)
SPLIT_JSON = (
    '{"name": "b", "forward_s": 1, "backward_input_s": 2.5, "backward_weight_s": 0.5, "activation_bytes": 64, '
    '"weight_stash_bytes": 16, "parameter_bytes": 8, "parameters": [], "buffers": [], "backward_s": 2.75, '
    '"cast_bytes": 0, "flops": 12, "sums": [["forward_s", "reduce", 1, 64]]}'
)
NOTHING = '{"fixed_s": 0.0, "per_tensor_s": 0.0, "per_byte_s": 0.0}'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            PROFILE,
            '{"layers": [{"name": "a", "forward_s": 1.0, "backward_input_s": 2.0, "backward_weight_s": 0.5, '
            '"activation_bytes": 64, "weight_stash_bytes": 16, "parameter_bytes": 8, "parameters": ["a.w"], '
            '"buffers": ["a.b"], "backward_s": null, "cast_bytes": 0, "flops": null, "sums": [], '
            f'"norm_sums": [["forward_s", 2, 32]]}}, {SPLIT_JSON}], '
            '"edges": [{"source": 0, "target": 1, "tensor": "relu", "bytes": 128, "differentiable": true, '
            '"order": 0, "saved_by_source": false, "saved_by_target": false, "shape": [4, 8]}], '
            '"device_type": "cpu", "microbatch": "[4, 8]", "parameter_sizes": {"a.w": 8}, "frozen_parameters": [], '
            '"buffer_sizes": {"a.b": 4}, "updated_buffers": ["a.b"], "checkpointed": [], "activation_factor": 1.0}',
        ),
        (
            COMPILED,
            f'{{"layers": [{SPLIT_JSON}], "edges": [], "device_type": "cuda", "microbatch": "[4]", '
            '"parameter_sizes": {}, "frozen_parameters": ["b.w"], "buffer_sizes": {}, "updated_buffers": [], '
            '"checkpointed": ["b"], "activation_factor": 1.0, "compiled": ["a", "b"], '
            '"split_parameters": ["w", "x"]}',
        ),
        (
            ModelSignature.of_profile(PROFILE),
            '{"layers": [{"name": "a", "parameters": {"a.w": 8}}, {"name": "b", "parameters": {}}], '
            '"edges": [{"source": 0, "target": 1, "tensor": "relu", "bytes": 128}]}',
        ),
        (
            Instruction("SEND_F", "send:m1", stage=0, microbatch=2, edge=1, peer="m1", wait=(3, 4), record=5),
            '{"op": "SEND_F", "lane": "send:m1", "stage": 0, "microbatch": 2, "edge": 1, "peer": "m1", '
            '"wait": [3, 4], "record": 5}',
        ),
        (
            UpdateCosts(LinearCost(1e-3, 2.0, 3.0), LinearCost(1.0)),
            '{"reduce": {"fixed_s": 0.001, "per_tensor_s": 2.0, "per_byte_s": 3.0}, '
            '"step": {"fixed_s": 1.0, "per_tensor_s": 0.0, "per_byte_s": 0.0}}',
        ),
        (
            UpdateCosts(sums=LinearCost(1.0), alone=("m1",), tensor={"m0": 2}, shared={"m0": 2}),
            f'{{"reduce": {NOTHING}, "step": {NOTHING}, "norm": {NOTHING}, "alone": ["m1"], '
            f'"sums": {NOTHING.replace("0.0", "1.0", 1)}, "agree": {NOTHING}, "tensor": {{"m0": 2}}, '
            f'"scatter": {NOTHING}, "gather": {NOTHING}, "shared": {{"m0": 2}}}}',
        ),
    ],
    ids=["profile", "compiled", "signature", "instruction", "update", "measured"],
)
def test_the_wire_is_as_it_was(value, text):
    assert json.dumps(value.to_json()) == text
    assert type(value).from_json(json.loads(text)) == value


def test_the_requests_of_tasks_are_as_they_were():
    removals = [
        RemovalRequest("file:///c", "job-a"),
        RemovalRequest("s3://b", "job-b", ("step-1",), True),
    ]
    text = (
        '[{"uri": "file:///c", "job": "job-a", "folders": null, "in_use": false}, '
        '{"uri": "s3://b", "job": "job-b", "folders": ["step-1"], "in_use": true}]'
    )
    assert removal_requests_json(removals) == text and removal_requests_from_json(text) == removals
    export = ExportRequest("file:///c", "job-a", 3, merged=True)
    text = '{"uri": "file:///c", "job": "job-a", "step": 3, "target": null, "format": "safetensors", "merged": true}'
    assert export.to_json() == text and ExportRequest.from_json(text) == export
    result = RemovalResult(("step-1",), {"step-2": "in use"}, (2,), 3, 4)
    assert removal_result_from_json(json.loads(json.dumps(to_json(result)))) == result


def test_a_reader_ignores_unknown_fields_where_the_writer_may_be_newer():
    request = {"uri": "u", "job": "j", "folders": None, "in_use": False, "colour": "blue"}
    assert removal_requests_from_json(json.dumps([request])) == [RemovalRequest("u", "j")]
    assert ModelSignature.from_json({"layers": [], "edges": [], "colour": 1}) == ModelSignature((), ())
    assert UpdateCosts.from_json({"colour": 1, "alone": None}) == UpdateCosts()


def test_an_unknown_or_missing_field_is_refused_by_name():
    with pytest.raises(ValueError, match=r"instruction has unknown fields colour; known: edge, lane, .*wait"):
        Instruction.from_json({"op": "F", "lane": "compute", "colour": 1})
    with pytest.raises(ValueError, match="LayerSignature has unknown fields colour"):
        ModelSignature.from_json({"layers": [{"name": "a", "parameters": {}, "colour": 1}], "edges": []})
    with pytest.raises(ValueError, match="MeshUpdate lacks step_s"):
        from_json(MeshUpdate, {"mesh": "m0", "reduce_s": 1.0})
