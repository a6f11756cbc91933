"""Twenty public models that no test had, chosen before any was tried, in jobs of two and three stages beside plain loops.

`python -m tests.benchmarks.unfamiliar [NAME ...]`, about twenty minutes; a name that begins with those given is run. The
libraries are no extra of ours: a model whose library is not installed is left out (results/unfamiliar.md has the list;
install them with --no-deps into a folder of PYTHONPATH). Each as benchmarks/opaque.py compares. `--with bf16`, `fp16`,
`tensor`, `recompute`, `stream`, `meshes`, `compile`, `freeze` or `groups` changes every job so, and its plain loop where
that is of the loop.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from service.spec.job import JobSpec
from tests.benchmarks.models.operators import declare
from tests.benchmarks.opaque import compare
from tests.worker.verify.proving import proof_of

WIDTH, LENGTH, CLASSES, WORDS = 16, 8, 5, 32
EQUAL = {"fp32": (1e-5, 1e-3), "bf16": (3e-3, 2e-2), "fp16": (1e-3, 1e-2)}
"""The greatest difference of a loss, and of a parameter as a part of what it moved, that is called equal."""

declare()  # torchvision beside a torch for CPU; here, as the factories below are imported by workers too


class Drawn:
    """Samples of `inputs` and a `target`: shapes of random numbers; `(shape, n)` of whole numbers below n."""

    def __init__(self, inputs: Sequence[Any], target: Any):
        self._inputs, self._target = inputs, target

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, ...], Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return tuple(_drawn(one, drawn) for one in self._inputs), _drawn(self._target, drawn)


class Streamed:
    """The same samples one behind the other, without numbers."""

    def __init__(self, inputs: Sequence[Any], target: Any):
        self._drawn = Drawn(inputs, target)

    def __iter__(self) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        return (self._drawn[index] for index in range(len(self._drawn)))


def _drawn(shape: Any, generator: torch.Generator) -> Tensor:
    if len(shape) == 2 and isinstance(shape[0], list):
        return torch.randint(shape[1], tuple(shape[0]), generator=generator)
    return torch.randn(tuple(shape), generator=generator)


class Between(nn.Module):
    """A linear layer, a module of a library on sequences, and a classifier of the mean over them."""

    def __init__(self, module: nn.Module, made: int, call: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        self.first, self.module, self.last = nn.Linear(WIDTH, WIDTH), module, nn.Linear(made, CLASSES)
        self._call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._call(self.module, self.first(x))).mean(1)


class Encoder(nn.Module):
    """The first module of a SentenceTransformer: an encoder of transformers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.model = BertModel(
            BertConfig(
                vocab_size=WORDS,
                hidden_size=WIDTH,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=2 * WIDTH,
                max_position_embeddings=LENGTH,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            ),
            add_pooling_layer=False,
        )

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self.model(features["input_ids"], attention_mask=features["attention_mask"])
        return features | {"token_embeddings": found.last_hidden_state}


class Sentences(nn.Module):
    """A SentenceTransformer, which takes a dict, on tokens."""

    def __init__(self) -> None:
        super().__init__()
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Dense, Normalize, Pooling

        self.model = SentenceTransformer(
            modules=[Encoder(), Pooling(WIDTH), Dense(WIDTH, WIDTH), Normalize()], device="cpu"
        )

    def forward(self, words: Tensor) -> Tensor:
        made = self.model({"input_ids": words, "attention_mask": (words > 0).long()})
        return made["sentence_embedding"]


def conformer() -> nn.Module:
    from torchaudio.models import Conformer

    module = Conformer(WIDTH, 2, 2 * WIDTH, 3, 5)
    return Between(module, WIDTH, lambda made, x: made(x, torch.full((len(x),), x.shape[1]))[0])


def deep_speech() -> nn.Module:
    from torchaudio.models import DeepSpeech

    return DeepSpeech(WIDTH, 2 * WIDTH, CLASSES)


def tiny_vit() -> nn.Module:
    from kornia.models.tiny_vit import TinyViT

    sizes = {"embed_dims": (16, 32, 32, 64), "depths": (1, 1, 2, 1), "num_heads": (2, 2, 2, 4)}
    return TinyViT(img_size=64, num_classes=CLASSES, window_sizes=(4, 4, 4, 2), **sizes)


def whisper() -> nn.Module:
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(ModelDimensions(8, LENGTH, WIDTH, 2, 2, WORDS, LENGTH, WIDTH, 2, 2))
    nn.init.normal_(model.decoder.positional_embedding, std=0.1)  # the library leaves it as memory was
    return model


def unet() -> nn.Module:
    from segmentation_models_pytorch import Unet

    return Unet("resnet18", encoder_weights=None, classes=CLASSES, decoder_channels=(32, 16, 16, 8, 8))


def deep_lab() -> nn.Module:
    from segmentation_models_pytorch import DeepLabV3Plus

    return DeepLabV3Plus("mobilenet_v2", encoder_weights=None, classes=CLASSES, decoder_channels=16)


def ecapa() -> nn.Module:
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    return ECAPA_TDNN(
        WIDTH,
        lin_neurons=CLASSES,
        channels=[16, 16, 16, 16, 48],
        attention_channels=8,
        res2net_scale=4,
        se_channels=8,
    )


def crdnn() -> nn.Module:
    from speechbrain.lobes.models.CRDNN import CRDNN

    return CRDNN(
        input_shape=[None, 2 * LENGTH, WIDTH],
        cnn_channels=[4, 8],
        rnn_layers=2,
        rnn_neurons=WIDTH,
        dnn_neurons=WIDTH,
    )


def efficient_net() -> nn.Module:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0", num_classes=CLASSES, image_size=64)


def inception() -> nn.Module:
    from facenet_pytorch import InceptionResnetV1

    return InceptionResnetV1(classify=True, num_classes=CLASSES)


def perceptual() -> nn.Module:
    from lpips import LPIPS

    return LPIPS(
        pretrained=False, net="squeeze", pnet_rand=True, pnet_tune=True, eval_mode=False, verbose=False
    )


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, time: Tensor, x: Tensor) -> Tensor:
        return self.layers(x) + time


class Flow(nn.Module):
    """A field, followed for a unit of time."""

    def __init__(self) -> None:
        super().__init__()
        self.field = Field()

    def forward(self, x: Tensor) -> Tensor:
        from torchdiffeq import odeint

        return odeint(self.field, x, torch.tensor([0.0, 1.0]), rtol=1e-3, atol=1e-4)[-1]


def ode() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Flow(), nn.Linear(WIDTH, WIDTH), Flow(), nn.Linear(WIDTH, CLASSES)
    )


class Tables(nn.Module):
    """TabNet, with the loss of its masks added to what it returns, as its own training adds it to the loss."""

    def __init__(self) -> None:
        super().__init__()
        from pytorch_tabnet.tab_network import TabNet

        self.model = TabNet(WIDTH, CLASSES, virtual_batch_size=4, group_attention_matrix=torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made, loss = self.model(x)
        return made - 1e-3 * loss


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from pytorch_forecasting.models.nhits.sub_modules import NHiTS

        self.model = NHiTS(
            context_length=24,
            prediction_length=6,
            output_size=[1],
            static_size=0,
            encoder_covariate_size=2,
            decoder_covariate_size=2,
            static_hidden_size=0,
            n_blocks=[1, 1, 1],
            n_layers=[2, 2, 2],
            hidden_size=[[32, 32]] * 3,
            pooling_sizes=[4, 2, 1],
            downsample_frequencies=[6, 3, 1],
            pooling_mode="max",
            interpolation_mode="linear",
            dropout=0.0,
            activation="ReLU",
            initialization="lecun_normal",
            batch_normalization=False,
            shared_weights=False,
            naive_level=True,
        )

    def forward(self, seen: Tensor, beside: Tensor, ahead: Tensor) -> Tensor:
        return self.model(seen, torch.ones(seen.shape[:2]), beside, ahead, None)[0]


class Codec(nn.Module):
    """The parts of an EncodecModel as training calls them: its own forward passes codes on, and no gradient."""

    def __init__(self) -> None:
        super().__init__()
        from encodec.modules.seanet import SEANetDecoder, SEANetEncoder
        from encodec.quantization import ResidualVectorQuantizer

        sizes = {"channels": 1, "dimension": WIDTH, "n_filters": 4, "ratios": [4, 2], "lstm": 1}
        self.encoder, self.decoder = SEANetEncoder(**sizes), SEANetDecoder(**sizes)
        self.quantizer = ResidualVectorQuantizer(dimension=WIDTH, n_q=2, bins=16)

    def forward(self, wave: Tensor) -> Tensor:
        made = self.quantizer(self.encoder(wave), 50)
        return self.decoder(made.quantized) + made.penalty


class Points(nn.Module):
    """Two convolutions of e3nn over all pairs of a few points, as its own tutorial writes them."""

    def __init__(self) -> None:
        super().__init__()
        from e3nn import nn as layers
        from e3nn import o3

        self.harmonics = o3.Irreps.spherical_harmonics(2)
        hidden, out = o3.Irreps("8x0e + 4x1o"), o3.Irreps(f"{CLASSES}x0e")
        self.products, self.radial = nn.ModuleList(), nn.ModuleList()
        for before, after in ((self.harmonics, hidden), (hidden, out)):
            product = o3.FullyConnectedTensorProduct(before, self.harmonics, after, shared_weights=False)
            self.products.append(product)
            self.radial.append(layers.FullyConnectedNet([4, 16, product.weight_numel], functional.silu))

    def forward(self, places: Tensor) -> Tensor:
        from e3nn import o3

        count = places.shape[1]
        one, other = torch.triu_indices(count, count, 1)
        source, target = torch.cat([one, other]), torch.cat([other, one])
        along = places[:, source] - places[:, target]
        angles = o3.spherical_harmonics(self.harmonics, along, normalize=True, normalization="component")
        near = torch.exp(-((along.norm(dim=-1, keepdim=True) - torch.linspace(0.5, 2.0, 4)) ** 2))
        rows = torch.zeros(len(places), count, angles.shape[-1]).index_add(1, target, angles)
        for product, radial in zip(self.products, self.radial, strict=True):
            made = product(rows[:, source], angles, radial(near.flatten(0, 1)).unflatten(0, near.shape[:2]))
            rows = torch.zeros(len(places), count, made.shape[-1]).index_add(1, target, made) / count**0.5
        return rows.sum(1)


class Tags(nn.Module):
    """BiLSTM-CRF: the negative log likelihood of each sentence."""

    def __init__(self) -> None:
        super().__init__()
        from torchcrf import CRF

        self.embed = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(2 * WIDTH, CLASSES)
        self.crf = CRF(CLASSES, batch_first=True)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        return -self.crf(self.scores(self.lstm(self.embed(words))[0]), tags, reduction="none")


def performer() -> nn.Module:
    from performer_pytorch import PerformerLM

    return PerformerLM(
        num_tokens=WORDS,
        max_seq_len=LENGTH,
        dim=WIDTH,
        depth=2,
        heads=2,
        dim_head=8,
        nb_features=8,
        causal=True,
    )


def esrgan() -> nn.Module:
    from spandrel.architectures.ESRGAN import ESRGAN  # noqa: F401
    from spandrel.architectures.ESRGAN.__arch.RRDB import RRDBNet

    return RRDBNet(num_filters=8, num_blocks=2, scale=2)


def mean(output: Tensor, target: Tensor) -> Tensor:
    """The loss of a model that returns one of each sample."""
    return output.mean()


def mean_over_time(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the mean over a sequence."""
    return functional.cross_entropy(output.mean(1), target)


def next_words(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of every word of a sequence."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


SQUARES, CLASS = "torch.nn.functional:mse_loss", "torch.nn.functional:cross_entropy"
LABEL = ((), CLASSES)


@dataclass(frozen=True)
class Case:
    """A model: its library's package, the name of its factory here, samples, loss and number of stages."""

    package: str
    factory: str
    inputs: Sequence[Any]
    target: Any = LABEL
    loss: str = CLASS
    stages: int = 3
    args: dict[str, Any] = field(default_factory=dict)
    tensor_plan: dict[str, str] | None = None
    """Which matrices two workers share with `--with tensor`, where no known family says so."""


def _here(name: str) -> str:
    return f"{__name__ if __name__ != '__main__' else 'tests.benchmarks.unfamiliar'}:{name}"


WORD_ROW = ((LENGTH,), WORDS)
IMAGE = (3, 32, 32)
CASES = {
    "SentenceTransformer": Case("sentence_transformers", "Sentences", [WORD_ROW], (WIDTH,), SQUARES),
    "Conformer": Case("torchaudio", "conformer", [(LENGTH, WIDTH)]),
    "DeepSpeech": Case(
        "torchaudio",
        "deep_speech",
        [(1, LENGTH, WIDTH)],
        loss="mean_over_time",
        tensor_plan={"fc1.fc": "colwise", "fc2.fc": "rowwise"},
    ),
    "TinyViT": Case("kornia", "tiny_vit", [(3, 64, 64)]),
    "Whisper": Case("whisper", "whisper", [(8, 2 * LENGTH), WORD_ROW], WORD_ROW, "next_words"),
    "Unet": Case("segmentation_models_pytorch", "unet", [(3, 64, 64)], ((64, 64), CLASSES)),
    "DeepLabV3+": Case("segmentation_models_pytorch", "deep_lab", [(3, 64, 64)], ((64, 64), CLASSES)),
    "ECAPA-TDNN": Case(
        "speechbrain",
        "ecapa",
        [(4 * LENGTH, WIDTH)],
        loss="mean_over_time",
        tensor_plan={"*.se_block.conv1.conv": "colwise", "*.se_block.conv2.conv": "rowwise"},
    ),
    "CRDNN": Case("speechbrain", "crdnn", [(2 * LENGTH, WIDTH)], loss="mean_over_time"),
    "EfficientNet-B0": Case("efficientnet_pytorch", "efficient_net", [(3, 64, 64)]),
    "InceptionResnetV1": Case("facenet_pytorch", "inception", [(3, 96, 96)]),
    "LPIPS": Case("lpips", "perceptual", [(3, 64, 64), (3, 64, 64)], (1, 1, 1), SQUARES),
    "neural ODE": Case("torchdiffeq", "ode", [(WIDTH,)]),
    "TabNet": Case("pytorch_tabnet", "Tables", [(WIDTH,)]),
    "N-HiTS": Case("pytorch_forecasting", "Forecast", [(24, 1), (24, 2), (6, 2)], (6, 1), SQUARES),
    "N-HiTS, one stage": Case(
        "pytorch_forecasting", "Forecast", [(24, 1), (24, 2), (6, 2)], (6, 1), SQUARES, stages=1
    ),
    "EnCodec": Case("encodec", "Codec", [(1, 256)], (1, 256), SQUARES),
    "e3nn": Case("e3nn", "Points", [(6, 3)], stages=2),
    "BiLSTM-CRF": Case("torchcrf", "Tags", [WORD_ROW, ((LENGTH,), CLASSES)], loss="mean"),
    "Performer": Case("performer_pytorch", "performer", [WORD_ROW], WORD_ROW, "next_words"),
    "RRDBNet": Case("spandrel", "esrgan", [(3, 8, 8)], (3, 16, 16), SQUARES),
}


def job(case: Case, **changes: Any) -> dict[str, Any]:
    """The job of a model; `changes` are sections of it."""
    if "tensor" in str(changes.get("resources")):
        changes = {**changes, "resources": {**changes["resources"], "tensor_plan": case.tensor_plan}}
    sections = {
        "model": {"factory": _here(case.factory), "args": case.args},
        "data": {"factory": _here("Drawn"), "args": {"inputs": case.inputs, "target": case.target}},
        "loss": {"factory": case.loss if ":" in case.loss else _here(case.loss)},
        "optimizer": {"factory": "torch.optim:SGD", "args": {"lr": 0.05, "momentum": 0.9}},
        "training": {"steps": 4, "global_batch": 16, "microbatches": 4, "seed": 7, "clip_grad_norm": 1.0},
        "pipeline": {"stages": case.stages, "schedule": "zb-h1" if case.stages > 1 else "auto"},
        "resources": {"meshes": case.stages, "device": "cpu"},
    }
    sections = json.loads(json.dumps(sections))  # a job has lists
    merged = {name: {**section, **changes.pop(name, {})} for name, section in sections.items()}
    return JobSpec.model_validate({**merged, **changes}).model_dump(mode="json")


VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"training": {"precision": "bf16"}},
    "fp16": {"training": {"precision": "fp16"}},
    "tensor": {
        "pipeline": {"stages": 2},
        "resources": {"meshes": [{"workers": 2, "parallel": {"data": 1, "tensor": 2}}] * 2},
    },
    "recompute": {"pipeline": {"recompute": "all"}},
    "stream": {"data": {"factory": _here("Streamed")}},
    "meshes": {
        "pipeline": {"stages": 2},
        "resources": {"meshes": [{"workers": 2}, {"workers": 1}]},
    },
    "compile": {"training": {"compile": True}},
    "freeze": {"model": {"freeze": ["*.bias"]}},
    "groups": {
        "optimizer": {
            "groups": [{"match": ["*.bias"], "lr": 0.01}],
            "args": {"lr": 0.05, "weight_decay": 0.1},
        }
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of names of models; all without")
    parser.add_argument("--with", dest="variants", nargs="+", choices=VARIANTS, help="changes of every job")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| model | stages | run as they are | loss | parameters | s |\n|---|---|---|---|---|---|", flush=True
    )
    different = 0
    for name, case in CASES.items():
        if arguments.names and not any(name.startswith(one) for one in arguments.names):
            continue
        try:
            importlib.import_module(case.package)
        except ImportError:
            print(f"| {name} | {case.stages} | {case.package} is not installed | | | |", flush=True)
            continue
        for variant in arguments.variants or [""]:
            began = time.monotonic()
            spec = job(case, **VARIANTS.get(variant, {}))
            found, equal = _row(spec)
            label, stages = f"{name}, {variant}" if variant else name, spec["pipeline"]["stages"]
            print(f"| {label} | {stages} | {found} | {time.monotonic() - began:.0f} |", flush=True)
            different += not equal
    return int(different > 0)


def _row(spec: dict[str, Any]) -> tuple[str, bool]:
    try:
        opaque, loss, moved = compare(spec)
        loss_limit, moved_limit = EQUAL[spec["training"]["precision"]]
        shown, equal = f"{loss:.0e} | {moved:.0e}", loss <= loss_limit and moved <= moved_limit
        if not equal:  # with other random numbers: those of the pipeline, in the plain model
            proof = proof_of(spec)
            equal = proof.difference is None
            shown = f"{'equal' if equal else proof.difference} ({shown}) | as `slotline verify` draws"
    except Exception as error:
        return f"refused | {type(error).__name__}: {' '.join(str(error).split())} | ", False
    return f"{', '.join(opaque)} | {shown}", equal


if __name__ == "__main__":
    sys.exit(main())
