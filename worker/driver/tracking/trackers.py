"""Trackers: one object per library that keeps the curves of a run, over all attempts and resumes of its job.

A library is imported by the tracker's own thread, when its run starts; none is needed by jobs that do not name it.
Steps that are trained again after a resume appear once: TensorBoard shows the new values, the others, which
overwrite nothing, keep those that they have. Knows nothing of queues, threads or the control plane.
"""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Mapping
from typing import Any, Protocol

from worker.contract.failures import AttemptFailure
from worker.contract.job import TrackerSpec
from worker.contract.profile import FactoryError
from worker.contract.reasons import Reason
from worker.model.factory import call_factory, resolve

SUCCEEDED, CANCELLED = "SUCCEEDED", "CANCELLED"
FINISH_LIMIT_S = 30.0
"""Time that trackers have together at the end of an attempt."""
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny", "trackio": "trackio"}


class Tracker(Protocol):
    """The methods of a tracker, called by one thread of the driver, one after the other.

    `start` comes first in every attempt, with the job's id; it may return where the run is shown, which an event tells.
    `log` has the values of a step by name; a resumed attempt begins behind the step of its checkpoint. `finish` comes
    last with SUCCEEDED, FAILED (another attempt may follow) or CANCELLED; a driver that dies calls it never. One that
    has a method `flush()` too is called after values, when no others wait. What raises is told by an event.
    """

    def start(self, run_id: str, name: str, config: Mapping[str, Any]) -> str | None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self, outcome: str) -> None: ...


def check_importable(spec: TrackerSpec) -> None:
    """Raise AttemptFailure CODE_SETUP_FAILED where the tracker's library or factory is not in this environment."""
    if spec.factory is not None:
        try:
            resolve(spec.factory)
        except FactoryError as error:
            raise AttemptFailure(Reason.CODE_SETUP_FAILED, f"tracking: {error}") from None
        return
    found = importlib.util.find_spec(spec.to)
    if found is None or found.origin is None:  # without an origin: a folder of that name, such as W&B's own
        package = _PACKAGES[spec.to]
        raise AttemptFailure(
            Reason.CODE_SETUP_FAILED,
            f"tracking names {spec.to}, and the driver's environment has no package {package}: add it to the job "
            f"(code: {{pip: [{package}]}}), install slotline[{spec.to}] on the Ray nodes, or leave the tracker out",
        )


def make_tracker(spec: TrackerSpec) -> Tracker:
    """The tracker that a job names. Raises FactoryError where a factory raises or makes something else."""
    if spec.factory is None:
        return _LIBRARIES[spec.to](spec)
    made = call_factory(spec.factory, spec.args)
    missing = [name for name in ("start", "log", "finish") if not callable(getattr(made, name, None))]
    if missing:
        raise FactoryError(
            f"factory {spec.factory!r} made a {type(made).__name__} without {', '.join(missing)}: a tracker has "
            "start(run_id, name, config), log(step, values) and finish(outcome)"
        )
    return made


class TensorBoard:
    """Event files in `dir`/NAME-ID, by torch's SummaryWriter.

    The first step of an attempt hides what earlier ones wrote from there on (purge_step).
    """

    def __init__(self, spec: TrackerSpec):
        self._folder = spec.dir.rstrip("/")
        self._config = ""
        self._writer: Any = None

    def start(self, run_id: str, name: str, config: Mapping[str, Any]) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._make_writer = SummaryWriter
        self._folder = f"{self._folder}/{name}-{run_id}"
        self._config = "\n".join(f"    {line}" for line in json.dumps(config, indent=2).splitlines())
        return self._folder

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._make_writer(self._folder, purge_step=step, flush_secs=10)
            self._writer.add_text("config", self._config, step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, outcome: str) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A run of Weights & Biases, whose id is the job's. WANDB_API_KEY, WANDB_MODE and others are its own variables."""

    def __init__(self, spec: TrackerSpec):
        self._project, self._entity = spec.project, spec.entity
        self._run: Any = None

    def start(self, run_id: str, name: str, config: Mapping[str, Any]) -> str | None:
        import wandb

        limit = {"finish_timeout": FINISH_LIMIT_S}
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            id=run_id,
            name=name,
            resume="allow",
            config=dict(config),
            # the driver's output stays where secrets are masked
            settings=wandb.Settings(
                console="off",
                quiet=True,
                **(limit if "finish_timeout" in wandb.Settings.model_fields else {}),
            ),
        )
        return None if self._run.offline else self._run.url

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._run.starting_step:  # it takes no step twice, and would warn of each
            self._run.log(dict(values), step=step)

    def finish(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome == SUCCEEDED else 1)


class Mlflow:
    """A run of MLflow, found again by a tag with the job's id. `uri` None: MLFLOW_TRACKING_URI.

    Tags have the last step of training and of evaluation that was logged: MLflow would have a step twice.
    """

    _JOB = "slotline.job"
    _STATUS = {SUCCEEDED: "FINISHED", CANCELLED: "KILLED"}  # noqa: RUF012 (nobody changes it)
    _MAX_METRICS, _MAX_PARAMS = 1000, 100  # of one request

    def __init__(self, spec: TrackerSpec):
        self._experiment, self._uri = spec.experiment, spec.uri
        self._client: Any = None
        self._run_id = ""
        self._last = {"slotline.train_step": -1, "slotline.eval_step": -1}
        self._waiting: list[Any] = []

    def start(self, run_id: str, name: str, config: Mapping[str, Any]) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        self._client = client = MlflowClient(tracking_uri=self._uri)
        experiment = self._experiment_id()
        found = client.search_runs([experiment], f"tags.`{self._JOB}` = '{run_id}'", max_results=1)
        if found:
            run = found[0]
            self._last |= {tag: int(run.data.tags.get(tag, -1)) for tag in self._last}
            client.update_run(run.info.run_id, status="RUNNING")
        else:
            run = client.create_run(experiment, run_name=name, tags={self._JOB: run_id})
            params = [Param(key, value) for key, value in _flatten(config["job"]).items()]
            for first in range(0, len(params), self._MAX_PARAMS):
                client.log_batch(run.info.run_id, params=params[first : first + self._MAX_PARAMS])
        self._run_id = run.info.run_id
        plan = _flatten(config["plan"], "slotline.plan")  # as tags: another attempt may have another plan
        client.log_batch(self._run_id, tags=[RunTag(key, value) for key, value in plan.items()])
        return f"run {self._run_id} of experiment {self._experiment}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        kind = (
            "slotline.eval_step"
            if any(name.startswith("eval/") for name in values)
            else "slotline.train_step"
        )
        if step <= self._last[kind]:
            return
        self._last[kind] = step
        now_ms = int(time.time() * 1000)
        self._waiting += [Metric(name, value, now_ms, step) for name, value in values.items()]

    def flush(self) -> None:
        """Send what was logged, many steps in one request where they wait."""
        from mlflow.entities import RunTag

        metrics, self._waiting = self._waiting, []
        tags = [RunTag(tag, str(step)) for tag, step in self._last.items()]
        most = self._MAX_METRICS - len(tags)
        for first in range(0, len(metrics), most):
            last = first + most >= len(metrics)
            self._client.log_batch(self._run_id, metrics[first : first + most], tags=tags if last else ())

    def finish(self, outcome: str) -> None:
        self._client.set_terminated(self._run_id, self._STATUS.get(outcome, "FAILED"))

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                return self._client.create_experiment(self._experiment)
            except MlflowException:  # another job was faster
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        return found.experiment_id


class Trackio:
    """A run of Trackio, which knows a run by its name: NAME-ID. TRACKIO_DIR, TRACKIO_SPACE_ID and others are its own
    variables."""

    def __init__(self, spec: TrackerSpec):
        self._project = spec.project
        self._run: Any = None
        self._first_step = 0

    def start(self, run_id: str, name: str, config: Mapping[str, Any]) -> str:
        import trackio

        self._run = trackio.init(
            project=self._project,
            name=f"{name}-{run_id}",
            resume="allow",
            config=dict(config),
            embed=False,
            auto_log_gpu=False,  # of the driver's machine, where nothing is trained
            auto_log_cpu=False,
        )
        self._first_step = self._run._next_step  # behind all that its run has; no public name tells it (0.43)
        return f"run {self._run.name} of project {self._project}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._first_step:  # it would show a step twice
            self._run.log(dict(values), step=step)

    def finish(self, outcome: str) -> None:
        self._run.finish()


_LIBRARIES = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


def _flatten(value: Any, name: str = "") -> dict[str, str]:
    """The leaves of nested objects as text by dotted name, in characters that MLflow takes; lists are one leaf."""
    if isinstance(value, Mapping):
        prefix = f"{name}." if name else ""
        return {key: text for part in value for key, text in _flatten(value[part], f"{prefix}{part}").items()}
    text = value if isinstance(value, str) else json.dumps(value)
    return {re.sub(r"[^\w\-. /]", "_", name)[:250]: text}
