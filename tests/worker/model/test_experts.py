"""Experts that are looped over as values choose them run on all tokens instead: the same results and gradients."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.missing import needs_libraries
from worker.model.hf_patches import run_all_experts

pytestmark = needs_libraries("transformers")

TOKENS, WIDTH, EXPERTS = 12, 8, 4


def switch():
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers import modeling_switch_transformers as modeling

    config = SwitchTransformersConfig(d_model=WIDTH, d_ff=12, num_experts=EXPERTS, dropout_rate=0.0)
    chosen = torch.nn.functional.one_hot(torch.randint(EXPERTS - 1, (TOKENS,)), EXPERTS)[:, None]
    chosen[3] = 0  # a token over the capacity
    return modeling.SwitchTransformersExperts(config), chosen, torch.rand(TOKENS, 1)


def top_two():
    return torch.stack([torch.randperm(EXPERTS - 1)[:2] for _ in range(TOKENS)]), torch.rand(TOKENS, 2)


def dbrx():
    from transformers import DbrxConfig
    from transformers.models.dbrx import modeling_dbrx as modeling

    config = DbrxConfig(
        d_model=WIDTH, ffn_config={"ffn_hidden_size": 12, "moe_num_experts": EXPERTS, "hidden_size": WIDTH}
    )
    experts = modeling.DbrxExperts(config.ffn_config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts, *top_two()


def longcat():
    from transformers import LongcatFlashConfig
    from transformers.models.longcat_flash import modeling_longcat_flash as modeling

    config = LongcatFlashConfig(
        hidden_size=WIDTH, expert_ffn_hidden_size=12, n_routed_experts=EXPERTS - 2, zero_expert_num=2
    )
    experts = modeling.LongcatFlashExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts, *top_two()


@pytest.mark.parametrize("make", [switch, dbrx, longcat])
def test_all_experts_give_what_the_chosen_ones_give(make):
    torch.manual_seed(3)
    experts, chosen, weights = make()
    found = []
    for dense in (False, True):
        own = copy.deepcopy(experts)
        if dense:
            (note,) = run_all_experts(own)
            assert type(experts).__name__ in note
        hidden = torch.linspace(-2, 2, TOKENS * WIDTH).reshape(TOKENS, WIDTH).requires_grad_()
        rates = weights.clone().requires_grad_()
        made = own(hidden, chosen, rates)
        made.square().sum().backward()
        found.append((made, hidden.grad, rates.grad, {name: p.grad for name, p in own.named_parameters()}))
    (made, hidden, rates, gradients), (all_made, all_hidden, all_rates, all_gradients) = found
    for one, other in ((made, all_made), (hidden, all_hidden), (rates, all_rates)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        expected = torch.zeros_like(all_gradients[name]) if gradient is None else gradient
        torch.testing.assert_close(all_gradients[name], expected, rtol=1e-5, atol=1e-4)


def test_other_modules_are_left_as_they_are():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert run_all_experts(model) == []
