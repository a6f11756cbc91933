"""A group of workers, threads here, beside one worker that has a whole stage."""

from __future__ import annotations

import copy
import threading

import torch

from worker.engine.autograd import backward_input
from worker.model.export import trace
from worker.parallel.tensor.graph_collectives import TensorGroup
from worker.parallel.tensor.tensor_stage import tensor_stage


class Together:
    """Sums over threads; remembers what each summed, in its order."""

    def __init__(self, workers: int):
        self._barrier = threading.Barrier(workers, timeout=60)
        self._given: list[torch.Tensor | None] = [None] * workers
        self.summed: list[list[tuple[int, ...]]] = [[] for _ in range(workers)]
        self.groups = [TensorGroup(w, workers, _Worker(self, w)) for w in range(workers)]

    def given(self, worker: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What all workers bring."""
        self.summed[worker].append(tuple(tensor.shape))
        self._given[worker] = tensor.clone()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


class _Worker:
    def __init__(self, together: Together, worker: int):
        self._together, self._worker = together, worker

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.copy_(sum(self._together.given(self._worker, tensor)))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        torch.stack(self._together.given(self._worker, tensor), out=out)


def whole_stage(model, inputs):
    traced = trace(model, inputs)
    return traced.cut([traced.layers[0]]).stages[0]


def gradients_of(stage, inputs, loss_of, *, split_backward):
    output = stage(*inputs)[-1]
    loss = loss_of(output)
    if split_backward:  # from the parameters alone: no input of the stage takes a gradient
        _, rest = backward_input([loss], [torch.ones_like(loss)], [])
        rest.run()
    else:
        loss.backward()
    return loss.detach(), {stage.original_names[local]: p.grad for local, p in stage.named_parameters()}


def check_equal(model, inputs, loss_of, *, workers=2, plan=None, split_backward=False):
    """Runs both; the group, and the first worker's stage."""
    stage = whole_stage(model, inputs)
    together = Together(workers)
    shared = [tensor_stage(copy.deepcopy(stage), plan, group) for group in together.groups]
    loss, expected = gradients_of(stage, inputs, loss_of, split_backward=False)
    found, errors = [None] * workers, []

    def run(worker):
        try:
            found[worker] = gradients_of(
                shared[worker].module, inputs, loss_of, split_backward=split_backward
            )
        except Exception as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    largest = max(float(whole.norm()) for whole in expected.values() if whole is not None)
    for worker, (own_loss, gradients) in enumerate(found):
        torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=1e-6)
        assert set(gradients) == set(expected)
        for name, whole in expected.items():
            if whole is None:
                continue
            split = shared[worker].splits.get(name)
            part = whole if split is None else split.pick(whole, worker, workers)
            assert (gradients[name] - part).norm() <= 1e-4 * whole.norm() + 1e-6 * largest, name
    assert all(one == together.summed[0] for one in together.summed), "all sum the same in one order"
    return together, shared[0]


TOKENS = (torch.arange(32).reshape(2, 16) * 7 % 32,)


def mean_square(output):
    return output.float().square().mean() + 0.01 * output.sum()
