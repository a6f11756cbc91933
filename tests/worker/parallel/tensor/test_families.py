"""Models of public families, with the built-in plan: the workers of a group compute what one does."""

from __future__ import annotations

import pytest
import torch

from tests.tiers import some_by_day
from tests.worker.parallel.tensor.beside_one import TOKENS, check_equal, mean_square
from worker.model.interface import adapt_model

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
WIDE = {"intermediate_size": 48}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 16}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        7,
    ),
    "LlamaForCausalLM": ("LlamaConfig", SMALL | WIDE | {"num_key_value_heads": 2}, 9),
    "Phi3ForCausalLM": (
        "Phi3Config",
        SMALL | WIDE | {"num_key_value_heads": 2, "pad_token_id": 0, "resid_pdrop": 0.0},
        6,
    ),
    "PhiForCausalLM": ("PhiConfig", SMALL | WIDE, 12),
    "FalconForCausalLM": ("FalconConfig", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2}, 5),
    "GPTJForCausalLM": (
        "GPTJConfig",
        {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 16, "rotary_dim": 4}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        9,
    ),
    "DistilBertForMaskedLM": (
        "DistilBertConfig",
        {"n_layers": 1, "dim": 32, "n_heads": 4, "hidden_dim": 48, "vocab_size": 64}
        | dict.fromkeys(("dropout", "attention_dropout"), 0.0),
        11,
    ),
    "BertForMaskedLM": ("BertConfig", SMALL | WIDE | CALM, 11),
    "ViTForImageClassification": ("ViTConfig", SMALL | WIDE | CALM | {"image_size": 16, "patch_size": 8}, 10),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"num_layers": 1, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "vocab_size": 64}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
        19,
    ),
}


@some_by_day("name", FAMILIES, by_day=1)
def test_a_family_shares_its_matrices(name):
    transformers = pytest.importorskip("transformers")
    config, arguments, parts = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**arguments))
    inputs, names = TOKENS, ["input_ids"]
    if name.startswith("ViT"):
        inputs, names = (torch.randn(2, 3, 16, 16),), ["pixel_values"]
    elif name.startswith("T5"):
        inputs, names = (*TOKENS, TOKENS[0][:, :12]), ["input_ids", "decoder_input_ids"]
    adapt_model(model, names, output="logits")
    _, shared = check_equal(model, inputs, mean_square)
    assert len(shared.splits) == parts
    vocabulary = 2 * 16 * 64  # logits, for the loss; and the bias of T5's places
    assert shared.gathered.elements <= vocabulary + 2 * 16 * 16 * 4
