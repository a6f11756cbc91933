"""More models of transformers: state spaces and recurrences between attention, experts, longer and older texts, sounds,
films, and words with pictures."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.models.entry import Entry, transformers
from tests.benchmarks.models.language import (
    BART,
    CAUSAL,
    CLASSIFIER,
    CLIP_SIDE,
    DECODER,
    ENCODER,
    ENDS,
    GPT2,
    HEADED,
    SEQUENCE,
    T5,
    WIDE,
)
from tests.benchmarks.models.pictures import IMAGES, SQUARES, VIT
from tests.benchmarks.models.samples import CLASSES, SIDE, WORDS

EXPERTS = {"num_experts_per_tok": 2}
WHOLE: dict[str, Any] = {"padded": False, "mask": False}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 8}
LAYERS = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
WAVES = ENCODER | {"conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4]}
WAVES |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
WAVES |= {"num_labels": CLASSES, "mask_time_prob": 0.0, "layerdrop": 0.0, "classifier_proj_size": 16}
FILM = VIT | {"num_frames": 4}


def _causal(name: str, config: str, args: dict[str, Any], **more: Any) -> Entry:
    return transformers(name, CAUSAL, config, args, "Text", **more)


def _classifier(name: str, config: str, args: dict[str, Any]) -> Entry:
    return transformers(name, SEQUENCE, config, args | {"num_labels": CLASSES}, "TextClasses")


def _images(name: str, config: str, args: dict[str, Any]) -> Entry:
    return transformers(name, IMAGES, config, args | {"num_labels": CLASSES}, "Images")


def _sounds(name: str, model: str, config: str, args: dict[str, Any]) -> Entry:
    return transformers(name, model, config, args, "Sounds")


def _shaped(
    name: str, model: str, config: str, args: dict[str, Any], inputs: dict[str, Any], **more
) -> Entry:
    target = more.pop("target", None)
    return transformers(
        name, model, config, args, "Shaped", samples_args={"inputs": inputs, "target": target}, **more
    )


RECURRENT = (
    _causal(
        "Jamba",
        "JambaConfig",
        DECODER
        | EXPERTS
        | {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}
        | {"mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    _causal("Bamba", "BambaConfig", DECODER | MAMBA | {"attn_layer_indices": [1, 3]}),
    _causal(
        "RecurrentGemma",
        "RecurrentGemmaConfig",
        ENCODER | {"lru_width": 32, "head_dim": 16, "num_key_value_heads": 1, "attention_window_size": 8},
    ),
    _causal(
        "xLSTM",
        "xLSTMConfig",
        {"hidden_size": 32, "embedding_dim": 32, "num_hidden_layers": 4, "num_blocks": 4, "num_heads": 2}
        | {"vocab_size": WORDS, "mode": "train", "chunk_size": 8, "return_last_states": False}
        | ENDS,
        samples_args=WHOLE,
    ),
    _causal("FalconMamba", "FalconMambaConfig", WIDE | {"state_size": 4}, samples_args=WHOLE),
    _causal(
        "Qwen3-Next",
        "Qwen3NextConfig",
        HEADED
        | EXPERTS
        | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
        | {"linear_value_head_dim": 16},
    ),
    _causal("LFM2", "Lfm2Config", DECODER | {"full_attn_idxs": [1, 3], "block_multiple_of": 16}),
    _causal(
        "Zamba2",
        "Zamba2Config",
        DECODER
        | {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 8, "n_mamba_heads": 4}
        | {"mamba_headdim": 16, "chunk_size": 8, "attention_head_dim": 32, "attention_hidden_size": 64}
        | {"adapter_rank": 4, "use_mamba_kernels": False},
    ),
    _causal("MiniMax", "MiniMaxConfig", HEADED | EXPERTS | {"num_local_experts": 4, "block_size": 8}),
)
EXPERT = (
    _causal("OLMoE", "OlmoeConfig", DECODER | EXPERTS | {"num_experts": 4}),
    _causal("GPT-OSS", "GptOssConfig", HEADED | EXPERTS | {"num_local_experts": 4, "sliding_window": 8}),
    _causal("PhiMoE", "PhimoeConfig", DECODER | EXPERTS | {"num_local_experts": 4}),
    _causal(
        "DeepSeek-V2",
        "DeepseekV2Config",
        DECODER
        | EXPERTS
        | LATENT
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
        | {"first_k_dense_replace": 1},
    ),
    _causal(
        "LongCat-Flash",
        "LongcatFlashConfig",
        {
            key: value
            for key, value in DECODER.items()
            if key not in ("num_hidden_layers", "intermediate_size")
        }
        | LATENT
        | {"num_layers": 2, "head_dim": 8, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2}
        | {"n_routed_experts": 4, "zero_expert_num": 2},
    ),
    transformers(
        "Switch Transformers",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        T5
        | {
            "num_experts": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "dropout_rate": 0.0,
        },
        "Text",
    ),
)
TEXTS = (
    _causal("StarCoder2", "Starcoder2Config", DECODER),
    _causal("CodeGen", "CodeGenConfig", GPT2 | {"n_head": 4, "rotary_dim": 4, "n_ctx": 64}),
    _causal("MPT", "MptConfig", {"d_model": 32, "n_heads": 2, "n_layers": 4, "vocab_size": WORDS} | ENDS),
    _causal("Cohere2", "Cohere2Config", DECODER | {"sliding_window": 8}),
    transformers("BigBird", "BigBirdForCausalLM", "BigBirdConfig", CLASSIFIER, "Text"),
    transformers(
        "XLNet",
        "XLNetForSequenceClassification",
        "XLNetConfig",
        {"d_model": 32, "n_layer": 4, "n_head": 2, "d_inner": 48, "vocab_size": WORDS, "num_labels": CLASSES}
        | {"problem_type": "single_label_classification"}
        | ENDS,
        "TextClasses",
    ),
    _classifier(
        "Funnel Transformer",
        "FunnelConfig",
        {"block_sizes": [2, 2], "num_decoder_layers": 1, "d_model": 32, "n_head": 2, "d_head": 16}
        | {"d_inner": 48, "vocab_size": WORDS, "pad_token_id": 0},
    ),
    transformers("FNet", "FNetForMaskedLM", "FNetConfig", CLASSIFIER, "Text", samples_args=WHOLE),
    _classifier("ConvBERT", "ConvBertConfig", CLASSIFIER | {"embedding_size": 32}),
    _classifier("Longformer", "LongformerConfig", CLASSIFIER | {"attention_window": 4}),
    transformers("Marian", "MarianMTModel", "MarianConfig", BART | {"pad_token_id": 0}, "Text"),
    transformers(
        "M2M100",
        "M2M100ForConditionalGeneration",
        "M2M100Config",
        BART | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        "Text",
    ),
    transformers("UMT5", "UMT5ForConditionalGeneration", "UMT5Config", T5, "Text"),
    transformers(
        "LongT5", "LongT5ForConditionalGeneration", "LongT5Config", T5 | {"local_radius": 3}, "Text"
    ),
)
SOUNDS = (
    _sounds("HuBERT", "HubertForSequenceClassification", "HubertConfig", WAVES),
    _sounds("WavLM", "WavLMForSequenceClassification", "WavLMConfig", WAVES),
    _sounds(
        "Data2Vec (audio)",
        "Data2VecAudioForSequenceClassification",
        "Data2VecAudioConfig",
        WAVES | {"conv_pos_kernel_size": 5, "num_conv_pos_embeddings": 2},
    ),
    _shaped(
        "Audio Spectrogram Transformer",
        "ASTForAudioClassification",
        "ASTConfig",
        LAYERS
        | {"patch_size": 8, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4}
        | {"num_labels": CLASSES},
        {"input_values": [32, 16], "labels": {"shape": [], "below": CLASSES}},
    ),
)
SEEN = (
    _images(
        "MobileViT",
        "MobileViTConfig",
        {"image_size": 64, "hidden_sizes": [16, 16, 24], "num_attention_heads": 2}
        | {"neck_hidden_sizes": [8, 8, 8, 8, 16, 16, 16]},
    ),
    _images("Data2Vec (vision)", "Data2VecVisionConfig", VIT),
    _images("DINOv2 with registers", "Dinov2WithRegistersConfig", VIT),
    transformers(
        "SigLIP (vision)",
        "SiglipForImageClassification",
        "SiglipConfig",
        {"vision_config": {key: value for key, value in VIT.items() if key != "num_labels"}}
        | {"num_labels": CLASSES},
        "Images",
    ),
    transformers(
        "ViTMAE",
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        {key: value for key, value in VIT.items() if key != "num_labels"}
        | {"decoder_num_attention_heads": 2, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 2}
        | {"decoder_intermediate_size": 24},
        "Pictures",
    ),
    _images(
        "PVT v2",
        "PvtV2Config",
        {"image_size": SIDE, "depths": [1] * 4, "hidden_sizes": [8, 8, 16, 16], "mlp_ratios": [2] * 4}
        | {"num_attention_heads": [1, 1, 2, 2]},
    ),
    _images(
        "PoolFormer",
        "PoolFormerConfig",
        {"depths": [1] * 4, "hidden_sizes": [8, 8, 16, 16]},
    ),
    _images(
        "FocalNet",
        "FocalNetConfig",
        {"image_size": SIDE, "patch_size": 2, "embed_dim": 8, "hidden_sizes": [8, 16], "depths": [2, 2]}
        | {"focal_levels": [2, 2], "focal_windows": [3, 3]},
    ),
    _shaped(
        "TimeSformer",
        "TimesformerForVideoClassification",
        "TimesformerConfig",
        FILM,
        {"pixel_values": [4, 3, SIDE, SIDE], "labels": {"shape": [], "below": CLASSES}},
    ),
    _shaped(
        "VideoMAE",
        "VideoMAEForVideoClassification",
        "VideoMAEConfig",
        FILM,
        {"pixel_values": [4, 3, SIDE, SIDE], "labels": {"shape": [], "below": CLASSES}},
    ),
    _shaped(
        "DPT",
        "DPTForDepthEstimation",
        "DPTConfig",
        {key: value for key, value in VIT.items() if key != "num_labels"}
        | {
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 8,
        },
        {"pixel_values": [3, SIDE, SIDE]},
        target=[SIDE, SIDE],
        loss=SQUARES,
        output="predicted_depth",
    ),
    _shaped(
        "LLaVA",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "vision_config": {
                "factory": "transformers:CLIPVisionConfig",
                "args": CLIP_SIDE | {"image_size": SIDE, "patch_size": 16, "projection_dim": 16},
            },
            "text_config": {"factory": "transformers:LlamaConfig", "args": DECODER},
            "image_token_index": 0,
            "image_seq_length": 4,
        },
        {"input_ids": {"shape": [12], "below": WORDS}, "pixel_values": [3, SIDE, SIDE]},
    ),
)
ENTRIES = (*RECURRENT, *EXPERT, *TEXTS, *SOUNDS, *SEEN)
