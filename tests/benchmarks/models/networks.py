"""More networks of timm and torchvision, and adapters of peft on models that are no plain decoders."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.models.entry import Entry
from tests.benchmarks.models.language import CLASSIFIER, GPT2, T5
from tests.benchmarks.models.pictures import CROSS_ENTROPY, VIT, timm, torchvision
from tests.benchmarks.models.samples import CLASSES


def _peft(
    name: str, model: str, config: str, args: dict[str, Any], samples: str, adapters: str, **more
) -> Entry:
    base = {
        "factory": f"transformers:{model}",
        "args": {"config": {"factory": f"transformers:{config}", "args": args}},
    }
    made = {"model": base, "peft_config": {"factory": f"peft:{adapters}", "args": more}}
    return Entry(name, "peft", "peft:get_peft_model", made, samples)


IA3 = {"target_modules": ["c_attn", "c_proj"], "feedforward_modules": ["c_proj"], "fan_in_fan_out": True}
DORA = {"r": 4, "use_dora": True, "target_modules": ["query", "value"], "task_type": "SEQ_CLS"}
LOHA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]}
PROMPT = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
CLASSIFIES = "BertForSequenceClassification"
SMALL = {"depths": [1, 1, 1, 1]}
VIDEO = {"inputs": {"x": [3, 4, 32, 32]}, "target": {"shape": [], "below": CLASSES}}
CLASSES_OF_VIT = {key: value for key, value in VIT.items() if key != "num_labels"} | {"num_labels": CLASSES}

ENTRIES = (
    timm("MaxViT (timm)", "maxvit_pico_rw_256", side=64, img_size=64, embed_dim=[32] * 4, **SMALL),
    timm("CoAtNet (timm)", "coatnet_pico_rw_224", side=64, img_size=64, embed_dim=[32] * 4, **SMALL),
    timm("NFNet (timm)", "test_nfnet"),
    timm("EdgeNeXt (timm)", "edgenext_xx_small", depths=[1, 1, 2, 1], dims=[8, 16, 16, 32]),
    timm(
        "CaiT (timm)",
        "cait_xxs24_224",
        side=32,
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=3,
        num_heads=2,
    ),
    timm("XCiT (timm)", "xcit_nano_12_p16_224", side=64, img_size=64, embed_dim=32, depth=3, num_heads=2),
    timm("ConvMixer (timm)", "convmixer_768_32", dim=16, depth=4),
    timm("GhostNet (timm)", "ghostnet_050"),
    timm("Sequencer (timm)", "sequencer2d_s", layers=[1, 1, 2, 1], embed_dims=[16, 32, 32, 32]),
    timm("RepVGG (timm)", "test_byobnet"),
    timm(
        "Twins (timm)",
        "twins_svt_small",
        side=64,
        img_size=64,
        embed_dims=[8, 16, 16, 32],
        depths=[1, 1, 2, 1],
    ),
    timm("HRNet (timm)", "hrnet_w18_small", side=64),
    torchvision(
        "DeepLabV3 (torchvision)",
        "segmentation.deeplabv3_mobilenet_v3_large",
        "Maps",
        side=64,
        output="out",
        args={"weights_backbone": None},
    ),
    torchvision("SqueezeNet (torchvision)", "squeezenet1_1"),
    torchvision("MNASNet (torchvision)", "mnasnet0_5"),
    Entry(
        "Swin (torchvision)",
        "torchvision",
        "torchvision.models.swin_transformer:SwinTransformer",
        {"patch_size": [2, 2], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4]}
        | {"num_classes": CLASSES},
        "Images",
        loss=CROSS_ENTROPY,
        needs_extra=True,
        samples_args={"named": False, "side": 32},
    ),
    Entry(
        "MC3 (torchvision, video)",
        "torchvision",
        "torchvision.models:video.mc3_18",
        {"weights": None, "num_classes": CLASSES},
        "Shaped",
        loss=CROSS_ENTROPY,
        needs_extra=True,
        samples_args=VIDEO,
    ),
    _peft("LoRA on T5", "T5ForConditionalGeneration", "T5Config", T5, "Text", "LoraConfig", r=4),
    _peft("IA3 on GPT-2", "GPT2LMHeadModel", "GPT2Config", GPT2, "Text", "IA3Config", **IA3),
    _peft("DoRA on BERT", CLASSIFIES, "BertConfig", CLASSIFIER, "TextClasses", "LoraConfig", **DORA),
    _peft(
        "LoHa on ViT",
        "ViTForImageClassification",
        "ViTConfig",
        CLASSES_OF_VIT,
        "Images",
        "LoHaConfig",
        **LOHA,
    ),
    _peft(
        "Prompt tuning on GPT-2",
        "GPT2LMHeadModel",
        "GPT2Config",
        GPT2,
        "Text",
        "PromptTuningConfig",
        **PROMPT,
    ),
)
