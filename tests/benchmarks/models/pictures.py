"""Models of pictures: transformers, timm, torchvision and diffusers."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.models.entry import Entry, transformers
from tests.benchmarks.models.samples import CLASSES, SIDE

LARGE = 96
"""Of images for networks that make them 32 times smaller: a batch norm over two values enlarges rounding a thousandfold."""
IMAGES = "AutoModelForImageClassification.from_config"
CROSS_ENTROPY, SQUARES = "torch.nn:CrossEntropyLoss", "torch.nn:MSELoss"
VIT = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
VIT |= {"image_size": SIDE, "patch_size": 8, "num_labels": CLASSES}
TWO = {
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
}
UNET = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": [8, 16], "norm_num_groups": 4}
CROSSED = {
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}


def _images(name: str, config: str, args: dict[str, Any]) -> Entry:
    return transformers(name, IMAGES, config, args | {"num_labels": CLASSES}, "Images")


def timm(name: str, model: str, *, side: int = LARGE, **args: Any) -> Entry:
    made = {"model_name": model, "num_classes": CLASSES, **args}
    return Entry(
        name,
        "timm",
        "timm:create_model",
        made,
        "Images",
        loss=CROSS_ENTROPY,
        needs_extra=True,
        samples_args={"named": False, "side": side},
    )


def torchvision(name: str, model: str, samples: str = "Images", *, side: int = LARGE, **more: Any) -> Entry:
    arguments = {"weights": None, "num_classes": CLASSES} | more.pop("args", {})
    return Entry(
        name,
        "torchvision",
        f"torchvision.models:{model}",
        arguments,
        samples,
        loss=CROSS_ENTROPY,
        needs_extra=True,
        samples_args={"named": False, "side": side},
        **more,
    )


def _diffusers(
    name: str, model: str, args: dict[str, Any], samples: dict[str, Any] | None, **more: Any
) -> Entry:
    kind = "Copies" if samples is None else "Noise"
    return Entry(
        name,
        "diffusers",
        f"diffusers:{model}",
        args,
        kind,
        loss=SQUARES,
        output="sample",
        samples_args=samples or {},
        **more,
    )


ENTRIES = (
    _images("ViT", "ViTConfig", VIT),
    transformers("DeiT", "DeiTForImageClassification", "DeiTConfig", VIT, "Images"),
    _images("BEiT", "BeitConfig", VIT),
    _images("DINOv2", "Dinov2Config", VIT),
    _images(
        "Swin",
        "SwinConfig",
        {"image_size": SIDE, "patch_size": 2, "embed_dim": 16, "depths": [2, 2]}
        | {"num_heads": [2, 2], "window_size": 4},
    ),
    _images(
        "Swin v2",
        "Swinv2Config",
        {"image_size": SIDE, "patch_size": 2, "embed_dim": 16, "depths": [2, 2]}
        | {"num_heads": [2, 2], "window_size": 4},
    ),
    _images("ConvNeXt", "ConvNextConfig", {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2}),
    _images("ResNet", "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]}),
    _images(
        "RegNet",
        "RegNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]} | {"groups_width": 4},
    ),
    _images(
        "MobileNetV2", "MobileNetV2Config", {"image_size": SIDE, "depth_multiplier": 0.25, "output_stride": 8}
    ),
    transformers(
        "SegFormer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4, "num_attention_heads": [1, 2, 2, 2]}
        | {"decoder_hidden_size": 16, "num_labels": CLASSES},
        "Maps",
    ),
    transformers(
        "DETR (logits)",
        "DetrForObjectDetection",
        "DetrConfig",
        {"use_timm_backbone": False, "use_pretrained_backbone": False, "num_queries": 6, "d_model": 32}
        | {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_labels": CLASSES}
        | {
            "backbone": None,
            "backbone_config": {
                "factory": "transformers:ResNetConfig",
                "args": {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4}
                | {"out_features": ["stage4"]},
            },
        },
        "Detections",
        loss=SQUARES,
        output="logits",
        samples_args={"queries": 6, "classes": CLASSES + 1},
    ),
    timm("ResNet (timm)", "resnet18"),
    timm("DenseNet (timm)", "densenet121", growth_rate=8, block_config=[2, 2, 2, 2]),
    timm("DenseNet-121 (timm)", "densenet121"),
    timm("EfficientNet (timm)", "efficientnet_b0"),
    timm("MobileNetV3 (timm)", "mobilenetv3_small_050"),
    timm("RegNet (timm)", "regnetx_002"),
    Entry(
        "MLP-Mixer (timm)",
        "timm",
        "timm.models.mlp_mixer:MlpMixer",
        {"num_classes": CLASSES, "img_size": SIDE, "patch_size": 8, "embed_dim": 32, "num_blocks": 4},
        "Images",
        loss=CROSS_ENTROPY,
        needs_extra=True,
        samples_args={"named": False},
    ),
    timm(
        "ViT (timm)",
        "vit_tiny_patch16_224",
        img_size=SIDE,
        side=SIDE,
        patch_size=8,
        embed_dim=32,
        depth=4,
        num_heads=2,
    ),
    timm("ConvNeXt (timm)", "convnext_atto", depths=[1, 1, 2, 1], dims=[8, 16, 16, 32]),
    torchvision("ResNet (torchvision)", "resnet18", args={"width_per_group": 64}),
    torchvision("MobileNetV2 (torchvision)", "mobilenet_v2", args={"width_mult": 0.25}),
    torchvision("ShuffleNet (torchvision)", "shufflenet_v2_x0_5"),
    torchvision(
        "LR-ASPP (torchvision)",
        "segmentation.lraspp_mobilenet_v3_large",
        "Maps",
        output="out",
        args={"weights_backbone": None},
    ),
    torchvision(
        "FCN (torchvision)",
        "segmentation.fcn_resnet50",
        "Maps",
        side=SIDE,
        output="out",
        args={"weights_backbone": None},
    ),
    _diffusers("UNet2DModel", "UNet2DModel", UNET | TWO, {}),
    _diffusers(
        "UNet2DConditionModel",
        "UNet2DConditionModel",
        UNET | CROSSED | {"cross_attention_dim": 16, "attention_head_dim": 4},
        {"channels": 4, "words": 16},
    ),
    _diffusers(
        "AutoencoderKL",
        "AutoencoderKL",
        {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
        | {"block_out_channels": [8, 16], "norm_num_groups": 4, "latent_channels": 4},
        None,
    ),
    _diffusers(
        "DiT",
        "DiTTransformer2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4}
        | {
            "num_layers": 4,
            "sample_size": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": 1000,
            "norm_num_groups": 4,
        },
        {"channels": 4, "side": 8, "image": "hidden_states", "labelled": True},
    ),
)
