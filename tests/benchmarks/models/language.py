"""Models of language, speech, and of both words and pictures: transformers, and adapters of peft."""

from __future__ import annotations

from tests.benchmarks.models.entry import Entry, transformers
from tests.benchmarks.models.samples import CLASSES, SIDE, WORDS

CAUSAL, SEQUENCE = "AutoModelForCausalLM.from_config", "AutoModelForSequenceClassification.from_config"
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {"num_hidden_layers": 4, "hidden_size": 32, "vocab_size": WORDS} | ENDS
ENCODER = WIDE | {"intermediate_size": 48, "num_attention_heads": 2}
DECODER = ENCODER | {"num_key_value_heads": 2, "max_position_embeddings": 64}
HEADED = DECODER | {"head_dim": 16}
CLASSIFIER = ENCODER | {"num_labels": CLASSES, "max_position_embeddings": 64}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
DISENTANGLED |= {"problem_type": "single_label_classification"}  # else its loss asks which labels are there
GPT2 = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": WORDS, "n_positions": 64} | ENDS
T5 = {"num_layers": 3, "d_model": 32, "d_ff": 48, "d_kv": 16, "num_heads": 2, "vocab_size": WORDS}
T5 |= {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
SIDES = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
BART = (
    {"d_model": 32, "vocab_size": WORDS, "max_position_embeddings": 64, "decoder_start_token_id": 2}
    | SIDES
    | ENDS
)
CLIP_SIDE = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


def _causal(name: str, config: str, args: dict, **more) -> Entry:
    return transformers(name, CAUSAL, config, args, "Text", **more)


def _classifier(name: str, config: str, args: dict) -> Entry:
    return transformers(name, SEQUENCE, config, args, "TextClasses")


def _adapted(name: str, base: str, config: str, args: dict, **lora) -> Entry:
    """A frozen model of transformers with adapters."""
    model = {
        "factory": f"transformers:{base}",
        "args": {"config": {"factory": f"transformers:{config}", "args": args}},
    }
    adapters = {"factory": "peft:LoraConfig", "args": {"r": 4, "lora_alpha": 8, **lora}}
    return Entry(name, "peft", "peft:get_peft_model", {"model": model, "peft_config": adapters}, "Text")


ENTRIES = (
    _causal("GPT-2", "GPT2Config", GPT2),
    _causal("Llama", "LlamaConfig", DECODER),
    _causal("Qwen2", "Qwen2Config", DECODER),
    _causal("Qwen3", "Qwen3Config", HEADED),
    _causal(
        "Qwen2-MoE",
        "Qwen2MoeConfig",
        DECODER
        | {"num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    _causal("Gemma", "GemmaConfig", HEADED),
    _causal("Gemma2", "Gemma2Config", HEADED),
    _causal("Mistral", "MistralConfig", DECODER),
    _causal("Mixtral", "MixtralConfig", DECODER | {"num_local_experts": 4}),
    _causal("Phi", "PhiConfig", DECODER),
    _causal("Cohere", "CohereConfig", DECODER),
    _causal("Nemotron", "NemotronConfig", DECODER),
    _causal("GLM", "GlmConfig", HEADED),
    _causal("Gemma3 (text)", "Gemma3TextConfig", HEADED),
    _causal("Granite", "GraniteConfig", DECODER),
    _causal("SmolLM3", "SmolLM3Config", DECODER),
    _causal(
        "Qwen3-MoE",
        "Qwen3MoeConfig",
        HEADED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    _causal(
        "DeepSeek-V3",
        "DeepseekV3Config",
        DECODER
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
    _causal("Phi-3", "Phi3Config", DECODER),
    _causal("OPT", "OPTConfig", WIDE | {"ffn_dim": 48, "num_attention_heads": 2, "word_embed_proj_dim": 32}),
    _causal(
        "BLOOM", "BloomConfig", {"n_layer": 4, "hidden_size": 32, "n_head": 2, "vocab_size": WORDS} | ENDS
    ),
    _causal("GPT-NeoX", "GPTNeoXConfig", ENCODER),
    _causal("GPT-J", "GPTJConfig", GPT2 | {"rotary_dim": 8}),
    _causal("Falcon", "FalconConfig", ENCODER),
    _causal("StableLM", "StableLmConfig", DECODER),
    _causal("OLMo-2", "Olmo2Config", DECODER),
    _causal("Mamba", "MambaConfig", WIDE | {"state_size": 4}, samples_args={"padded": False, "mask": False}),
    _causal(
        "Mamba-2",
        "Mamba2Config",
        WIDE | {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1} | {"chunk_size": 8},
        samples_args={"padded": False, "mask": False},
    ),
    _causal(
        "RWKV",
        "RwkvConfig",
        WIDE | {"attention_hidden_size": 32},
        samples_args={"padded": False, "mask": False},
    ),
    transformers("T5", "T5ForConditionalGeneration", "T5Config", T5, "Text"),
    transformers("mT5", "MT5ForConditionalGeneration", "MT5Config", T5, "Text"),
    transformers("BART", "BartForConditionalGeneration", "BartConfig", BART, "Text"),
    transformers("Pegasus", "PegasusForConditionalGeneration", "PegasusConfig", BART, "Text"),
    _classifier("BERT", "BertConfig", CLASSIFIER),
    transformers("BERT (masked words)", "BertForMaskedLM", "BertConfig", CLASSIFIER, "Text"),
    _classifier("RoBERTa", "RobertaConfig", CLASSIFIER),
    _classifier(
        "DistilBERT",
        "DistilBertConfig",
        {"n_layers": 4, "dim": 32, "hidden_dim": 48, "n_heads": 2}
        | {"vocab_size": WORDS, "num_labels": CLASSES, "pad_token_id": 0},
    ),
    _classifier("ALBERT", "AlbertConfig", CLASSIFIER | {"embedding_size": 16}),
    _classifier("DeBERTa", "DebertaConfig", CLASSIFIER | DISENTANGLED),
    _classifier("DeBERTa-v2", "DebertaV2Config", CLASSIFIER | DISENTANGLED | {"pooler_hidden_size": 32}),
    _classifier("ModernBERT", "ModernBertConfig", CLASSIFIER | {"cls_token_id": 1, "sep_token_id": 2}),
    _classifier("LayoutLM", "LayoutLMConfig", CLASSIFIER),
    _classifier("ELECTRA", "ElectraConfig", CLASSIFIER | {"embedding_size": 16}),
    transformers(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        BART
        | {"num_mel_bins": 16, "max_source_positions": 24, "max_target_positions": 16}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
        "Speech",
    ),
    transformers(
        "Wav2Vec2",
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        ENCODER
        | {"conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4]}
        | {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
        | {"num_labels": CLASSES, "mask_time_prob": 0.0, "layerdrop": 0.0, "classifier_proj_size": 16},
        "Sounds",
    ),
    transformers(
        "CLIP",
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": CLIP_SIDE | {"vocab_size": WORDS, "max_position_embeddings": 32} | ENDS,
            "vision_config": CLIP_SIDE | {"image_size": SIDE, "patch_size": 8},
            "projection_dim": 16,
        },
        "Captions",
        loss="torch.nn:CrossEntropyLoss",
        output="logits_per_image",
    ),
    _adapted(
        "LoRA on GPT-2", "GPT2LMHeadModel", "GPT2Config", GPT2, target_modules=["c_attn"], fan_in_fan_out=True
    ),
    _adapted(
        "LoRA on Llama", CAUSAL, "LlamaConfig", DECODER, target_modules=["q_proj", "v_proj"], lora_dropout=0.1
    ),
)
