"""How a job's data is chosen, ordered and read. Values only, as jobspec.py, of which it is a part."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from service.job_values import Text

_Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Loader(BaseModel):
    """Processes of torch's DataLoader that read a worker's samples."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    workers: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0, description="Processes; 0 reads on a thread of the worker. A stream is read by one at most"
    )
    prefetch: Annotated[int, Field(ge=1, le=64)] = Field(
        default=2, description="Microbatches that each process reads ahead"
    )
    pin_memory: bool = Field(
        default=True, description="On CUDA: copy samples to the device from pinned memory"
    )
    timeout_s: _Seconds = Field(
        default=120.0,
        description="For how long a process may be silent before the attempt ends with its name",
    )


class DataReading(BaseModel):
    """All but the factory and what puts samples together."""

    prefetch: Annotated[int, Field(ge=0, le=64)] = Field(
        default=2,
        description="Steps whose samples are read while an earlier one runs; 0 reads them when they are needed "
        "(streams and loader processes: 1)",
    )
    split: Text | None = Field(
        default=None, description="Which of several data sets by name the factory's result has"
    )
    columns: list[Text] | dict[Text, Text] | None = Field(
        default=None,
        description="Of samples that are dicts: which fields are taken, or {name in the model: field}; null: all",
    )
    shuffle: bool = Field(
        default=True,
        description="A new order every epoch; false: the data set's own. A stream has its own order in any case",
    )
    at_end: Literal["repeat", "stop"] = Field(
        default="repeat",
        description="What the end of the data does: it begins again, or the job ends with the last whole batch",
    )
    skip_limit_s: _Seconds = Field(
        default=600.0,
        description="For how long a resume may pass over samples of a stream that cannot go to a place by itself",
    )
    loader: Loader = Loader()

    @model_validator(mode="after")
    def _columns_name_something(self) -> Self:
        if self.columns is not None and not self.columns:
            raise ValueError("columns names no field: name those that the model takes, or leave it out")
        return self
