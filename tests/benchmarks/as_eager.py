"""`python -m tests.benchmarks.as_eager`: what traced models cost beside the models as they run eagerly (4 minutes).

Four tables: attention calls of public models without a mask, before and after the graph pass (`worker/model/passes`);
memory and time of a step of three of them, before, after and eagerly; the weight gradients W of a block in stages of 4 and
of 32 blocks, beside what autograd takes for them; and the time in which loops over time are traced and checked.
"Before" is the same tree without the pass. Times are medians of rounds in which each side has its turn.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.worker.model.test_attention import ATTENTION_CALLS, counts, public_model
from tests.worker.model.test_time_loops import CellsInTurn, Scan
from worker.checks.trace import check_trace
from worker.engine.autograd import backward_input
from worker.model.export import trace
from worker.model.interface import adapt_model

BATCH, LENGTH, WIDTH, WORDS = 2, 512, 256, 512
ROUNDS = 7
BLOCK_ROWS, BLOCK_WIDTH = 64, 128


@contextlib.contextmanager
def without_passes() -> Iterator[None]:
    """The tracer without the passes over attention and constants."""
    with (
        mock.patch("worker.model.export.simplify_attention", return_value=False),
        mock.patch("worker.model.export.fold_constants"),
    ):
        yield


def main() -> int:
    torch.set_num_threads(1)
    attention_table()
    step_table()
    weight_table()
    loop_table()
    return 0


def attention_table() -> None:
    print("| model | attention calls | without a mask before | after | causal | outputs and gradients |")
    print("|---|---|---|---|---|---|")
    for name in ATTENTION_CALLS:
        model, inputs = public_model(name)
        with without_passes():
            before = counts(trace(model, inputs))
        traced = trace(model, inputs)
        after = counts(traced)
        notes = check_trace(model, traced, lambda: _squares, torch.zeros(BATCH))
        equal = "; ".join(notes) or "equal"
        print(f"| {name} | {after[0]} | {before[1]} | {after[1]} | {after[2]} | {equal} |", flush=True)


def _squares(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=4, n_head=8, **dropout)
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=4,
            num_attention_heads=8,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def step_table() -> None:
    print(f"\nA step of {BATCH} x {LENGTH} tokens, four layers of {WIDTH}, 8 heads, one stage.\n")
    print(
        "| model | kept for the backward, MB: eager, before, after | ms: eager, before, after |\n|---|---|---|"
    )
    for build in (llama, gpt2, bert):
        torch.manual_seed(0)
        model = build().train()
        adapt_model(model, ["input_ids"], output="logits")
        words = torch.randint(3, WORDS, (BATCH, LENGTH))
        sides = {"eager": model}
        for name, context in (("before", without_passes()), ("after", contextlib.nullcontext())):
            with context:
                traced = trace(model, (words,))
            (sides[name],) = traced.cut(traced.layers[:1]).stages
        kept = {name: kept_bytes(side, words) for name, side in sides.items()}
        took = interleaved({name: functools.partial(_step, side, words) for name, side in sides.items()})
        megabytes = ", ".join(f"{kept[name] / 1e6:.1f}" for name in sides)
        times = ", ".join(f"{1e3 * took[name]:.0f}" for name in sides)
        print(f"| {type(model).__name__} | {megabytes} | {times} |", flush=True)


def _step(module: nn.Module, *inputs: Tensor) -> None:
    output = module(*inputs)
    (output[0] if isinstance(output, tuple) else output).square().mean().backward()
    module.zero_grad()


def kept_bytes(module: nn.Module, *inputs: Tensor) -> int:
    """The bytes that autograd keeps of a forward besides the module's own tensors: of each storage once."""
    own = {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers(), *inputs)}
    held: dict[int, Tensor] = {}  # the tensors, so that no storage is taken again

    def keep(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            held[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(*inputs)
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def interleaved(sides: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The median seconds of each side, after one round that does not count."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(ROUNDS + 1):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            if number:
                took[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in took.items()}


def weight_table() -> None:
    print(
        f"\nW of a block (norm, two linear layers of {BLOCK_WIDTH} by {4 * BLOCK_WIDTH}, {BLOCK_ROWS} rows), ms.\n"
    )
    print("| blocks | F | I | W | W by autograd alone |\n|---|---|---|---|---|")
    of_w = {}
    for count in (4, 32):
        took = [_split_step(count) for _ in range(3 * ROUNDS)][ROUNDS:]
        forward, backward, weights, plain = (
            1e3 * statistics.median(one[k] for one in took) / count for k in range(4)
        )
        of_w[count] = weights
        print(f"| {count} | {forward:.3f} | {backward:.3f} | {weights:.3f} | {plain:.3f} |", flush=True)
    print(f"\nW of a block in a stage of 32 over that in one of 4: {of_w[32] / of_w[4]:.2f}")


def _blocks(count: int) -> nn.Sequential:
    width = BLOCK_WIDTH
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(count)
        )
    )


def _split_step(count: int) -> tuple[float, float, float, float]:
    """Seconds of F, I and W of one microbatch, and of W as autograd runs it: gradients of the parameters from the graph
    that I has kept whole."""
    torch.manual_seed(0)
    module = _blocks(count)
    x = torch.randn(BLOCK_ROWS, BLOCK_WIDTH, requires_grad=True)
    gradient = torch.randn(BLOCK_ROWS, BLOCK_WIDTH)
    parameters = [*module.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    began = time.perf_counter()
    output = module(x)
    forward = time.perf_counter()
    _, rest = backward_input([output], [gradient], [x])
    inputs = time.perf_counter()
    rest.run()
    weights = time.perf_counter()
    output = module(x)
    torch.autograd.grad([output], [x], [gradient], retain_graph=True)
    before = time.perf_counter()
    torch.autograd.grad([output], parameters, [gradient])
    plain = time.perf_counter()
    return forward - began, inputs - forward, weights - inputs, plain - before


def loop_table() -> None:
    print("\nSeconds to trace a loop over time and to compare the trace with the model.\n")
    print("| model | tokens | trace | check |\n|---|---|---|---|")
    loops: dict[str, Callable[[], nn.Module]] = {
        "four state-space layers, one behind the other": lambda: nn.Sequential(*(Scan() for _ in range(4))),
        "two cells in turn at each token": CellsInTurn,
    }
    for name, build in loops.items():
        for tokens in (16, 64):
            torch.manual_seed(0)
            model, inputs = build(), torch.randn(2, tokens, 8)
            began = time.perf_counter()
            traced = trace(model, (inputs,))
            traced_at = time.perf_counter()
            check_trace(model, traced, nn.MSELoss, torch.zeros_like(inputs))
            checked_at = time.perf_counter()
            print(
                f"| {name} | {tokens} | {traced_at - began:.1f} | {checked_at - traced_at:.1f} |", flush=True
            )


if __name__ == "__main__":
    sys.exit(main())
