"""Raw models of transformers, with labels: they trace by keyword, and the check finds their graphs true."""

from __future__ import annotations

import torch

from tests.missing import needs_libraries
from tests.tiers import some_by_day
from worker.checks.trace import check_trace
from worker.model.export import trace
from worker.model.factory import call_factory
from worker.model.interface import adapt_model

pytestmark = needs_libraries("transformers")


CAUSAL, IMAGES = "AutoModelForCausalLM.from_config", "AutoModelForImageClassification.from_config"
ENCODER = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
}
DECODER = ENCODER | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 96}

# factory, configuration, its arguments, what a sample holds
MODELS = {
    "gpt2": (CAUSAL, "GPT2Config", {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 96}, "text"),
    "llama": (CAUSAL, "LlamaConfig", DECODER, "text"),
    "mistral": (CAUSAL, "MistralConfig", DECODER, "text"),
    "qwen2": (CAUSAL, "Qwen2Config", DECODER, "text"),
    "qwen3": (CAUSAL, "Qwen3Config", DECODER | {"head_dim": 16}, "text"),
    "gemma": (CAUSAL, "GemmaConfig", DECODER | {"head_dim": 16}, "text"),
    "gemma2": (CAUSAL, "Gemma2Config", DECODER | {"head_dim": 16}, "text"),
    "mixtral": (CAUSAL, "MixtralConfig", DECODER | {"num_local_experts": 4}, "text"),
    "phi": (CAUSAL, "PhiConfig", DECODER, "text"),
    "gpt-neox": (CAUSAL, "GPTNeoXConfig", ENCODER, "text"),
    "opt": (
        CAUSAL,
        "OPTConfig",
        WIDE | {"ffn_dim": 48, "num_attention_heads": 2, "word_embed_proj_dim": 32, "pad_token_id": 0},
        "text",
    ),
    "bloom": (
        CAUSAL,
        "BloomConfig",
        {"n_layer": 2, "hidden_size": 32, "n_head": 2, "vocab_size": 96},
        "text",
    ),
    "mamba": (CAUSAL, "MambaConfig", WIDE | {"state_size": 4}, "text"),
    "rwkv": (CAUSAL, "RwkvConfig", WIDE | {"attention_hidden_size": 32}, "text"),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"num_layers": 1, "d_model": 32, "d_ff": 48, "d_kv": 16, "num_heads": 2, "vocab_size": 96}
        | {"decoder_start_token_id": 0},
        "text",
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {"d_model": 32, "vocab_size": 96, "pad_token_id": 0}
        | {f"{side}_layers": 1 for side in ("encoder", "decoder")}
        | {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
        | {f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
        "text",
    ),
    "bert": ("BertForSequenceClassification", "BertConfig", ENCODER, "class of a text"),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", ENCODER, "class of a text"),
    "electra": (
        "ElectraForSequenceClassification",
        "ElectraConfig",
        ENCODER | {"embedding_size": 32},
        "class of a text",
    ),
    "distilbert": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"n_layers": 2, "dim": 32, "hidden_dim": 48, "n_heads": 2, "vocab_size": 96},
        "class of a text",
    ),
    "vit": (
        IMAGES,
        "ViTConfig",
        {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
        | {"image_size": 32, "patch_size": 8},
        "class of an image",
    ),
    "swin": (
        IMAGES,
        "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}
        | {"window_size": 4},
        "class of an image",
    ),
    "convnext": (
        IMAGES,
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        "class of an image",
    ),
    "resnet": (
        IMAGES,
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        "class of an image",
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4, "num_attention_heads": [1, 2, 2, 2]}
        | {"decoder_hidden_size": 16},
        "map of an image",
    ),
}


def sample(kind):
    """A batch of two, by name."""
    torch.manual_seed(1)
    ids, images, classes = torch.randint(3, 90, (2, 12)), torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    text = {"attention_mask": torch.ones(2, 12, dtype=torch.long), "input_ids": ids}
    return {
        "text": text | {"labels": ids},
        "class of a text": text | {"labels": classes},
        "class of an image": {"labels": classes, "pixel_values": images},
        "map of an image": {"labels": torch.randint(0, 2, (2, 32, 32)), "pixel_values": images},
    }[kind]


@some_by_day("name", MODELS, by_day=1)
def test_a_raw_model_is_traced_true_with_dropout_and_its_own_loss(name):
    factory, config, arguments, kind = MODELS[name]
    torch.manual_seed(0)
    given = {"config": {"factory": f"transformers:{config}", "args": arguments}}
    model = call_factory(f"transformers:{factory}", given).train()
    batch = sample(kind)
    if name == "rwkv":
        del batch["attention_mask"]
    names = sorted(batch)
    adapt_model(model, names, own_loss=True)
    traced = trace(model, tuple(batch[key] for key in names))
    assert len(traced.layers) >= 4
    notes = check_trace(model, traced, lambda: lambda output, _: output, torch.zeros(2))
    own_backward = ["GeLUFunction, of whose own backward tracing keeps nothing"] if name == "bloom" else []
    assert len(notes) == len(own_backward), notes
    assert all(said in note for said, note in zip(own_backward, notes, strict=True))
