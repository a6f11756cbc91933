"""Optimizers and factories of jobs: those that look across parameters, written as published, and those that look odd but
update each parameter by itself."""

from __future__ import annotations

import random

import torch


class _OfAll(torch.optim.Optimizer):
    """Calls `update` with all parameters and their gradients."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        trained = [p for each in self.param_groups for p in each["params"] if p.grad is not None]
        self.update(trained, [p.grad for p in trained], group)

    def kept(self, parameter, *names):
        """The tensors of these names that are kept of a parameter; zeros at first."""
        state = self.state[parameter]
        return [state.setdefault(name, torch.zeros_like(parameter)) for name in names]


class NormedSGD(_OfAll):
    """SGD along the gradient of all parameters, divided by its norm."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr=lr)

    def update(self, trained, gradients, group):
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for p, g in zip(trained, gradients, strict=True):
            p.sub_(g / norm, alpha=group["lr"])


class ClippedSGD(_OfAll):
    """SGD that clips by the norm of all gradients: nothing else than SGD while they are small."""

    def __init__(self, parameters, lr=0.01, limit=50.0):
        super().__init__(parameters, lr=lr, limit=limit)

    def update(self, trained, gradients, group):
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for p, g in zip(trained, gradients, strict=True):
            p.sub_(g * min(1.0, group["limit"] / float(norm)), alpha=group["lr"])


class Prodigy(_OfAll):
    """Mishchenko and Defazio 2023 (arXiv 2306.06101), algorithm 4; `growth` as in their code."""

    def __init__(self, parameters, lr=1.0, d0=1e-6, growth=float("inf")):
        super().__init__(parameters, lr=lr, d=d0, largest=d0, r=0.0, growth=growth)

    def update(self, trained, gradients, group):
        beta1, beta2, d, lr = 0.9, 0.999, group["d"], group["lr"]
        root, total = beta2**0.5, 0.0
        r = root * group["r"]
        for p, g in zip(trained, gradients, strict=True):
            if "start" not in self.state[p]:
                self.state[p]["start"] = p.clone()
            m, v, s = self.kept(p, "m", "v", "s")
            r += (1 - root) * lr * d**2 * float((g * (self.state[p]["start"] - p)).sum())
            s.mul_(root).add_(g, alpha=(1 - root) * lr * d**2)
            m.mul_(beta1).add_(g, alpha=(1 - beta1) * d)
            v.mul_(beta2).addcmul_(g, g, value=(1 - beta2) * d**2)
            total += float(s.abs().sum())
            p.addcdiv_(m, v.sqrt() + d * 1e-8, value=-lr * d)
        largest = max(group["largest"], r / total)
        for each in self.param_groups:
            each.update(r=r, largest=largest, d=min(largest, d * group["growth"]))


class DAdaptAdam(_OfAll):
    """Defazio and Mishchenko 2023 (arXiv 2301.07733), the Adam of D-Adaptation."""

    def __init__(self, parameters, lr=1.0, d0=1e-6):
        super().__init__(parameters, lr=lr, d=d0, r=0.0)

    def update(self, trained, gradients, group):
        beta1, beta2, d, lr = 0.9, 0.999, group["d"], group["lr"]
        root, total = beta2**0.5, 0.0
        r = root * group["r"]
        for p, g in zip(trained, gradients, strict=True):
            m, v, s = self.kept(p, "m", "v", "s")
            m.mul_(beta1).add_(g, alpha=(1 - beta1) * lr * d)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            scale = v.sqrt() + 1e-8
            r += (1 - root) * lr * d * float((g * s / scale).sum())
            s.mul_(root).add_(g, alpha=(1 - root) * lr * d)
            total += float(s.abs().sum())
            p.addcdiv_(m, scale, value=-1.0)
        for each in self.param_groups:
            each.update(r=r, d=max(d, r / ((1 - root) * total)))


class Lamb(_OfAll):
    """You et al. 2020 (arXiv 1904.00962): Adam's direction as long as the parameter itself."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, lr=lr)

    def update(self, trained, gradients, group):
        for p, g in zip(trained, gradients, strict=True):
            m, v = self.kept(p, "m", "v")
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            direction = m / (v.sqrt() + 1e-6) + 0.01 * p
            p.sub_(direction * (p.norm() / direction.norm()), alpha=group["lr"])


class GlobalLamb(_OfAll):
    """LAMB whose gradients are first divided by the norm of all of them (section 3 of You et al. in NVIDIA's
    implementation), and whose direction is as long as all parameters together; its sums can be completed."""

    sum_over_ranks = None

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, lr=lr)

    def update(self, trained, gradients, group):
        norm = self.norm_of(gradients)
        for p, g in zip(trained, gradients, strict=True):
            m, v = self.kept(p, "m", "v")
            m.mul_(0.9).add_(g / norm, alpha=0.1)
            v.mul_(0.999).addcmul_(g / norm, g / norm, value=0.001)
        directions = [m / (v.sqrt() + 1e-6) + 0.01 * p for p in trained for m, v in [self.kept(p, "m", "v")]]
        ratio = self.norm_of(trained) / self.norm_of(directions)
        for p, direction in zip(trained, directions, strict=True):
            p.sub_(direction * ratio, alpha=group["lr"])

    def norm_of(self, tensors):
        total = sum((t.double().square().sum() for t in tensors), torch.zeros((), dtype=torch.float64))
        return float((total if self.sum_over_ranks is None else self.sum_over_ranks(total)).sqrt())


class MedianNorm(GlobalLamb):
    """Says that its numbers are sums, and they are not."""

    def norm_of(self, tensors):
        norms = torch.stack([t.norm().double() for t in tensors])
        return float(norms.median() if self.sum_over_ranks is None else self.sum_over_ranks(norms.median()))


class Langevin(_OfAll):
    """Welling and Teh 2011: SGD with noise."""

    def __init__(self, parameters, lr=0.01, temperature=1e-3):
        super().__init__(parameters, lr=lr, temperature=temperature)

    def update(self, trained, gradients, group):
        noise = (2 * group["lr"] * group["temperature"]) ** 0.5
        for p, g in zip(trained, gradients, strict=True):
            p.sub_(g, alpha=group["lr"]).add_(torch.randn_like(p), alpha=noise)


class Dithered(_OfAll):
    """SGD whose rate is drawn in each step, by Python."""

    def update(self, trained, gradients, group):
        lr = random.uniform(0.005, 0.02)
        for p, g in zip(trained, gradients, strict=True):
            p.sub_(g, alpha=lr)


class NormedLangevin(NormedSGD):
    """Noise on top of an update that looks across parameters."""

    def update(self, trained, gradients, group):
        super().update(trained, gradients, group)
        for p in trained:
            p.add_(torch.randn_like(p), alpha=1e-4)


class FlatSigns(_OfAll):
    """Signs of a momentum, computed of one vector of all parameters: an element may round otherwise where it lies
    elsewhere."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, lr=lr)

    def update(self, trained, gradients, group):
        for p, g in zip(trained, gradients, strict=True):
            self.kept(p, "m")[0].lerp_(g, 0.1)
        flat = torch.cat([self.kept(p, "m")[0].reshape(-1) for p in trained])
        rounded = flat + torch.arange(len(flat)) * torch.finfo(flat.dtype).eps * flat
        update = rounded.sign() + rounded.tanh()
        for p, part in zip(trained, update.split([p.numel() for p in trained]), strict=True):
            p.sub_(part.view_as(p), alpha=group["lr"])


class SinglePrecision(NormedSGD):
    """As those of kernels that know one type."""

    def update(self, trained, gradients, group):
        if any(p.dtype != torch.float32 for p in trained):
            raise TypeError("fp32 is wanted")
        super().update(trained, gradients, group)


class NormsLogged(_OfAll):
    """SGD that keeps the norm of all gradients beside its settings, for people to look at."""

    def update(self, trained, gradients, group):
        group["norm"] = float(torch.stack([g.norm() for g in gradients]).norm())
        for p, g in zip(trained, gradients, strict=True):
            p.sub_(g, alpha=0.01)


class ReadsAttribute(NormedSGD):
    """Reads what a model sets of its parameters, and a trial does not."""

    def update(self, trained, gradients, group):
        assert all(p.of_model for p in trained)


class TakesModel(NormedSGD):
    """As one that was written for a model of matrices: it takes no vectors beside them, which a trial has."""

    def update(self, trained, gradients, group):
        if len({p.ndim for p in trained}) > 1:
            raise ValueError("matrices of one model are wanted")
        super().update(trained, gradients, group)


class FailsLate(_OfAll):
    """SGD that raises in its 30th step."""

    def update(self, trained, gradients, group):
        group["steps"] = group.get("steps", 0) + 1
        if group["steps"] > 29:
            raise RuntimeError("it fails late")
        for p, g in zip(trained, gradients, strict=True):
            p.sub_(g, alpha=0.01)


class TakesMatrices(NormedSGD):
    def __init__(self, parameters, lr=0.1):
        parameters = list(parameters)
        if any(p.ndim != 2 for p in parameters):
            raise ValueError("matrices are wanted")
        super().__init__(parameters, lr)


def by_count(parameters):
    parameters = list(parameters)
    return torch.optim.SGD(parameters, lr=0.1 / len(parameters), weight_decay=0.0)


def by_position(parameters, count=20):
    """The first parameters without decay."""
    parameters = list(parameters)
    return torch.optim.AdamW(
        [{"params": parameters[:count], "weight_decay": 0.0}, {"params": parameters[count:]}]
    )


def by_depth(parameters):
    """A rate that falls from parameter to parameter, as for transfer learning."""
    return torch.optim.SGD([{"params": [p], "lr": 0.1 * 0.9**depth} for depth, p in enumerate(parameters)])


def by_dimension(parameters):
    parameters = list(parameters)
    vectors, others = ([p for p in parameters if (p.ndim < 2) == wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": others}], lr=0.01)


def wants_many(parameters):
    """Raises for a mesh of few parameters, where training raises it too."""
    parameters = list(parameters)
    if len(parameters) < 40:
        raise IndexError("a head is missing")
    return torch.optim.SGD(parameters, lr=0.1)


def first_group_slowly(parameters):
    """Of groups the first at a tenth of the rate; of parameters too."""
    first, *others = parameters
    groups = [each if isinstance(each, dict) else {"params": [each]} for each in (first, *others)]
    return torch.optim.SGD([groups[0] | {"lr": 0.01}, *groups[1:]], lr=0.1)
