"""Models of diffusers beyond those of two dimensions: one and three, transformers, controls, autoencoders."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.models.entry import Entry
from tests.benchmarks.models.pictures import CROSS_ENTROPY, SQUARES

TIME = {"shape": [], "below": 1000}
TEXT = [6, 16]
LATENT, FILM = [4, 8, 8], [4, 3, 8, 8]
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
SMALL = {"block_out_channels": [8, 16], "norm_num_groups": 4, "layers_per_block": 1}
SAME = {"in_channels": 4, "out_channels": 4, "num_layers": 4, "sample_size": 8}
CODER = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
CODER |= {"norm_num_groups": 4}
SEEN = {"shape": [6], "ones": True}


def _of(name: str, args: dict[str, Any], inputs: dict[str, Any], target: Any, **more: Any) -> Entry:
    """The model of that name in diffusers."""
    return Entry(
        name,
        "diffusers",
        f"diffusers:{name}",
        args,
        "Shaped",
        samples_args={"inputs": inputs, "target": target},
        **({"loss": SQUARES, "output": "sample"} | more),
    )


def _blocks(kind: str) -> dict[str, Any]:
    return {
        "down_block_types": [f"CrossAttnDownBlock{kind}", f"DownBlock{kind}"],
        "up_block_types": [f"UpBlock{kind}", f"CrossAttnUpBlock{kind}"],
        "cross_attention_dim": 16,
    }


ENTRIES = (
    _of(
        "SD3Transformer2DModel",
        SAME
        | HEADS
        | {"joint_attention_dim": 16, "caption_projection_dim": 32, "pooled_projection_dim": 24}
        | {"pos_embed_max_size": 16},
        {
            "hidden_states": LATENT,
            "encoder_hidden_states": TEXT,
            "pooled_projections": [24],
            "timestep": TIME,
        },
        LATENT,
    ),
    _of(
        "FluxTransformer2DModel",
        HEADS
        | {"in_channels": 4, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 16}
        | {"pooled_projection_dim": 24, "axes_dims_rope": [4, 4, 8]},
        {"hidden_states": [16, 4], "encoder_hidden_states": TEXT, "pooled_projections": [24], "timestep": []}
        | {"img_ids": [16, 3], "txt_ids": [6, 3]},
        [16, 4],
    ),
    _of(
        "PixArtTransformer2DModel",
        SAME
        | HEADS
        | {"cross_attention_dim": 32, "caption_channels": 16, "norm_num_groups": 4}
        | {"use_additional_conditions": False},
        {
            "hidden_states": LATENT,
            "encoder_hidden_states": TEXT,
            "timestep": TIME,
            "encoder_attention_mask": SEEN,
        },
        LATENT,
    ),
    _of(
        "SanaTransformer2DModel",
        SAME
        | HEADS
        | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32}
        | {"caption_channels": 16},
        {"hidden_states": LATENT, "encoder_hidden_states": TEXT, "timestep": TIME},
        LATENT,
    ),
    _of(
        "WanTransformer3DModel",
        HEADS
        | {
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 48,
            "num_layers": 4,
        }
        | {"rope_max_seq_len": 32},
        {"hidden_states": FILM, "encoder_hidden_states": TEXT, "timestep": TIME},
        FILM,
    ),
    _of(
        "UNet1DModel",
        {
            "sample_size": 32,
            "in_channels": 4,
            "out_channels": 4,
            "block_out_channels": [8, 16],
            "act_fn": "swish",
        }
        | {"time_embedding_type": "positional", "use_timestep_embedding": True, "flip_sin_to_cos": False}
        | {"freq_shift": 1.0, "down_block_types": ["DownResnetBlock1D"] * 2}
        | {"up_block_types": ["UpResnetBlock1D"], "mid_block_type": "MidResTemporalBlock1D"}
        | {"out_block_type": "OutConv1DBlock"},
        {"sample": [4, 32], "timestep": TIME},
        [4, 32],
    ),
    _of(
        "UNet3DConditionModel",
        SMALL | _blocks("3D") | {"sample_size": 8, "attention_head_dim": 4},
        {"sample": FILM, "timestep": TIME, "encoder_hidden_states": TEXT},
        FILM,
    ),
    _of(
        "UNetMotionModel",
        SMALL
        | _blocks("Motion")
        | {"sample_size": 8, "num_attention_heads": 2, "motion_num_attention_heads": 2}
        | {"motion_max_seq_length": 8},
        {"sample": FILM, "timestep": TIME, "encoder_hidden_states": TEXT},
        FILM,
    ),
    _of(
        "ControlNetModel",
        SMALL
        | {key: value for key, value in _blocks("2D").items() if key != "up_block_types"}
        | {"attention_head_dim": 4, "conditioning_embedding_out_channels": [4, 8]},
        {"sample": LATENT, "timestep": TIME, "encoder_hidden_states": TEXT, "controlnet_cond": [3, 16, 16]},
        [16, 4, 4],
        output="mid_block_res_sample",
    ),
    _of(
        "VQModel",
        CODER | {"block_out_channels": [8, 16], "num_vq_embeddings": 16},
        {"sample": [3, 16, 16]},
        [3, 16, 16],
    ),
    _of(
        "AutoencoderTiny",
        {"encoder_block_out_channels": [8] * 4, "decoder_block_out_channels": [8] * 4}
        | {"num_encoder_blocks": [1] * 4, "num_decoder_blocks": [1] * 4},
        {"sample": [3, 32, 32]},
        [3, 32, 32],
    ),
    _of(
        "UVit2DModel",
        {"hidden_size": 32, "cond_embed_dim": 16, "micro_cond_encode_dim": 8, "micro_cond_embed_dim": 40}
        | {"encoder_hidden_size": 16, "vocab_size": 32, "codebook_size": 31, "in_channels": 16}
        | {"block_out_channels": 16, "num_res_blocks": 1, "block_num_heads": 2, "num_hidden_layers": 4}
        | {"num_attention_heads": 2, "intermediate_size": 48, "sample_size": 8},
        {"input_ids": {"shape": [8, 8], "below": 31}, "encoder_hidden_states": TEXT, "pooled_text_emb": [16]}
        | {"micro_conds": [5]},
        {"shape": [8, 8], "below": 31},
        loss=CROSS_ENTROPY,
        output=None,
    ),
)
