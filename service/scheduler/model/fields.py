"""The fields of a PipelineSpec and what each may hold by itself (DESIGN section 4)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool


def _number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError("write a number, without quotes")
    return value


Float = Annotated[float, BeforeValidator(_number)]
Integer = Annotated[int, BeforeValidator(_number)]
Seconds = Annotated[Float, Field(ge=0, allow_inf_nan=False)]
Bandwidth = Annotated[Float, Field(gt=0, allow_inf_nan=False)]
MOST = 2**53  # what every reader of JSON takes as it is
Bytes = Annotated[Integer, Field(ge=0, le=MOST)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Contention = Literal["none", "link", "full-duplex", "half-duplex"]


class SpecError(ValueError):
    """A spec that no plan can satisfy; the message names the value and the least change that helps."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MeshSpec(_Model):
    """A group of accelerators; all limits are optional. `memory_bytes` is for everything that a mesh holds."""

    name: Name
    activation_limit_bytes: Bytes | None = None
    memory_bytes: Bytes | None = None
    receive_buffer_limit: Annotated[Integer, Field(ge=0, le=MOST)] | None = None


class RecomputeSpec(_Model):
    """What a stage keeps when it drops its activations, and how much longer its B or I takes then.

    `rematerialised_bytes` come back for B (or from I to W): the rest of its activations where null. With
    `required` the stage recomputes under every schedule; else `auto` may choose it.
    """

    activation_bytes: Bytes
    extra_s: Seconds
    rematerialised_bytes: Bytes | None = None
    required: StrictBool = False


class StageSpec(_Model):
    """A piece of the model on one mesh; costs are of one microbatch.

    `backward_s` is how long B lasts where that was measured; null means as long as I and W together.
    `static_bytes` (weights, gradients, optimizer state) are held always; `rematerialised_bytes` besides the
    activation from the start of B or I to its end (what then is still held of both is the weight stash);
    `recompute` may be chosen by `auto`.
    """

    name: Name
    mesh: Name
    forward_s: Seconds
    backward_input_s: Seconds = 0.0
    backward_weight_s: Seconds = 0.0
    backward_s: Seconds | None = None
    activation_bytes: Bytes = 0
    weight_stash_bytes: Bytes = 0
    rematerialised_bytes: Bytes = 0
    static_bytes: Bytes = 0
    recompute: RecomputeSpec | None = None

    @property
    def whole_backward_s(self) -> float:
        """How long B lasts."""
        split_s = self.backward_input_s + self.backward_weight_s
        return split_s if self.backward_s is None else self.backward_s

    def shortest_split(self) -> StageSpec:
        """The stage with I and W that last no longer together than its B, each as large a part as it is."""
        split_s = self.backward_input_s + self.backward_weight_s
        part = min(1.0, self.whole_backward_s / split_s) if split_s else 1.0
        shorter = {
            "backward_input_s": self.backward_input_s * part,
            "backward_weight_s": self.backward_weight_s * part,
            "backward_s": None,
        }
        return self.model_copy(update=shorter)


class EdgeSpec(_Model):
    """A tensor from one stage to another: its transfer times, or its sizes. With times, `held_bytes` is what each end
    holds of it meanwhile."""

    source: Name
    target: Name
    forward_s: Seconds | None = None
    backward_s: Seconds | None = None
    forward_bytes: Bytes | None = None
    backward_bytes: Bytes | None = None
    tensor: str | None = None
    held_bytes: Bytes | None = None


class LinkSpec(_Model):
    """One directed pair of meshes; what is null is as in the rest of the network."""

    source: Name
    target: Name
    bandwidth_bytes_per_s: Bandwidth | None = None
    latency_s: Seconds | None = None


class NetworkSpec(_Model):
    """What transfers may share, and how bytes become seconds; `links` are the pairs that differ from the rest."""

    contention: Contention = "none"
    bandwidth_bytes_per_s: Bandwidth | None = None
    latency_s: Seconds = 0.0
    links: list[LinkSpec] = []


class PipelineSpec(_Model):
    """Stages, edges, meshes and costs: what `make_plan` turns into a Plan."""

    microbatches: Annotated[Integer, Field(ge=1, le=1_000_000)]
    meshes: Annotated[list[MeshSpec], Field(min_length=1)]
    stages: Annotated[list[StageSpec], Field(min_length=1)]
    edges: list[EdgeSpec] = []
    network: NetworkSpec = NetworkSpec()
    overlap: StrictBool = True
    schedule: str = "auto"
    orders: dict[str, list[str]] | None = None
    split_backward: StrictBool | None = None
    max_in_flight: Annotated[Integer, Field(ge=1, le=MOST)] | None = None
