"""The dashboard of one job: its curves, plan beside measurement, links, idle time, checkpoints, start."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.models import dashboard as models
from panels import bars, board, curves, data_link, marks, number, page_links, rows_of, variable, with_rows

_JOB = '{job="$job"}'
_HOUR = "[1h]"
_LENGTH = f"max by (job) (slotline_profiled_step_seconds{_JOB})"
_AT = "&var-name=${name}&var-job=${job}&var-at=${__to:date:seconds}&${datasource:queryparam}"
# So many zeros that Grafana takes the number for a time and not, with eight or fifteen digits, for a date.
TIMELINE = f"/d/slotline-timeline?from=0&to={'0' * 24}${{__value.raw}}{_AT}"


def build() -> models.Dashboard:
    built = (
        board(
            "Slotline: job",
            "slotline-job",
            "One job: loss, speed, plan beside measurement, links, idle time.",
        )
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .with_variable(variable("name", "Job", "label_values(slotline_job_info, name)"))
        .with_variable(variable("job", "Id", 'label_values(slotline_job_info{name="$name"}, job)'))
        .with_variable(
            variable("url", "Control plane", "label_values(slotline_control_plane_info, url)").hide(
                models.VariableHide.HIDE_VARIABLE
            )
        )
        .annotation(marks("Checkpoints", _max("checkpoint_timestamp_seconds"), "Checkpoint saved", "#73bf69"))
        .annotation(
            marks(
                "Interruptions",
                f"max by (job, reason) (slotline_attempt_end_timestamp_seconds{_JOB})",
                "{{reason}}",
                "#f2495c",
            )
        )
    )
    return with_rows(
        page_links(built),
        [
            ("$name", _now()),
            ("Training", _training()),
            ("Evaluation", _evaluation()),
            ("Plan and measurement", _plan()),
            ("Links", _links()),
            ("Last profiled step", _profiled()),
            ("Start, checkpoints, memory", _keeping()),
        ],
    )


def _max(name: str) -> str:
    return f"max by (job) (slotline_{name}{_JOB})"


def _now() -> list[Any]:
    step = number(
        "Length of the profiled step",
        "µs",
        f"round(1e6 * {_LENGTH})",
        about="From its first slot to its last, of all its slots. Click: its timeline.",
        span=6,
    )
    return [
        rows_of(
            "Job",
            f"max by (job, name, owner, queue, state, attempt) (slotline_job_info{_JOB})",
            columns={
                "name": "Name",
                "owner": "Owner",
                "queue": "Queue",
                "state": "State",
                "attempt": "Attempt",
            },
            about="As the control plane has it.",
            span=12,
            height=4,
        ),
        number("Step", "none", _max("step"), about="The last finished step.", span=3),
        number("Profiled step", "none", _max("profiled_step"), about="The last profiled step.", span=3),
        step.data_links([data_link("Open the timeline", TIMELINE)]),
    ]


def _training() -> list[Any]:
    histogram = f"sum by (le) (rate(slotline_step_seconds_bucket{_JOB}[$__rate_interval]))"

    def rate(name: str) -> str:
        return f"sum by (job) (rate(slotline_{name}_total{_JOB}[$__rate_interval]))"

    return [
        curves(
            "Loss", "short", (_max("train_loss"), "loss"), about="Of the last finished step.", from_zero=False
        ),
        curves(
            "Step time",
            "s",
            (f"histogram_quantile(0.5, {histogram})", "median"),
            (f"histogram_quantile(0.95, {histogram})", "95 %"),
            (_max("plan_step_seconds"), "planned"),
            about="From the end of one step to the end of the next; planned: makespan, REDUCE and STEP. Points are single "
            "steps: they name the step and its trace, where Prometheus keeps exemplars.",
            exemplars=True,
        ),
        curves(
            "Samples per second",
            "short",
            (rate("samples"), "samples"),
            about="Samples that the job trains on.",
            span=4,
        ),
        curves(
            "Tokens per second",
            "short",
            (rate("tokens"), "tokens"),
            about="Empty where the samples are no sequences of tokens.",
            span=4,
        ),
        curves(
            "Model FLOPs per second",
            "flops",
            (_max("model_flops_per_second"), "model"),
            about="Forward and backward of every sample, over the time of a step; what is computed again to save memory "
            "does not count.",
            span=6,
        ),
        curves(
            "MFU",
            "percentunit",
            (_max("mfu"), "MFU"),
            about="Model FLOPs per second over the peak of the job's accelerators; empty where that is unknown, as on CPU.",
            span=6,
        ),
        curves(
            "Gradient norm",
            "short",
            (_max("grad_norm"), "norm"),
            about="Of all gradients together, of the last finished step, before clipping.",
            span=6,
        ),
        curves(
            "Learning rate",
            "short",
            (_max("learning_rate"), "rate"),
            about="Of the last finished step, of the first group of parameters.",
            span=6,
        ),
        curves(
            "Metrics of the loss",
            "short",
            (f"max by (name) (slotline_job_metric{_JOB})", "{{name}}"),
            about="What the loss returns beside itself, of the last finished step.",
            span=24,
            from_zero=False,
        ),
    ]


def _evaluation() -> list[Any]:
    return [
        curves(
            "Evaluation loss",
            "short",
            (_max("evaluation_loss"), "evaluation"),
            (_max("train_loss"), "training"),
            about="Of the last evaluation, beside that of the last finished step; empty where the job evaluates nothing.",
            span=12,
            from_zero=False,
        ),
        curves(
            "Metrics of the evaluation",
            "short",
            (f"max by (name) (slotline_evaluation_metric{_JOB})", "{{name}}"),
            about="What the loss returned beside itself in the last evaluation.",
            span=12,
            from_zero=False,
        ),
    ]


def _plan() -> list[Any]:
    idle = f"sum by (reason) (rate(slotline_idle_accelerator_seconds_total{_JOB}[$__rate_interval]))"
    hours = f"sum by (reason) (increase(slotline_idle_accelerator_seconds_total{_JOB}{_HOUR})) / 3600"
    return [
        curves(
            "Makespan: first plan, calibrated and measured",
            "s",
            (_max("plan_makespan_seconds"), "first plan"),
            (_max("calibrated_makespan_seconds"), "calibrated"),
            (_max("makespan_seconds"), "measured"),
            about="From the first forward to the end of the last backward; calibrated: the plan with the costs that "
            "profiled steps gave.",
        ),
        curves(
            "Bubble: planned and measured",
            "percentunit",
            (_max("plan_bubble_ratio"), "planned"),
            (_max("bubble_ratio"), "measured"),
            about="Share of the makespan in which meshes compute nothing.",
        ),
        curves(
            "Computing over plan",
            "percentunit",
            (f"max by (mesh) (slotline_mesh_compute_seconds_over_plan{_JOB})", "{{mesh}}"),
            about="Of each mesh in the last profiled step, measured over planned: a straggler stands alone.",
        ),
        curves(
            "Idle accelerators",
            "short",
            (idle, "{{reason}}"),
            stacked=True,
            about="How many accelerators of the job were idle, by reason, on average.",
        ),
        curves(
            "Idle accelerator-hours of the last hour",
            "h",
            (hours, "{{reason}}"),
            stacked=True,
            about="fill: before a mesh's first action; drain: behind its last; exposed transfer: a transfer of its own "
            "runs; waits: none does; between steps: the host, and the updates of others.",
        ),
        curves(
            "Exposed transfer time",
            "s",
            (_max("exposed_transfer_seconds"), "exposed"),
            span=4,
            about="Seconds of a step in which a mesh was idle while its transfers ran, summed over meshes.",
        ),
        curves(
            "Overlap",
            "percentunit",
            (_max("overlap_ratio"), "overlap"),
            span=4,
            about="Share of transfer time that computation hid.",
        ),
    ]


def _links() -> list[Any]:
    def by_link(name: str) -> str:
        return f"max by (source, target) (slotline_{name}{_JOB})"

    link = "{{source}} → {{target}}"
    return [
        curves(
            "Link seconds over plan",
            "percentunit",
            (by_link("link_seconds_over_plan"), link),
            about="Transfers of the last profiled step, both ends being ready, measured over planned.",
        ),
        curves(
            "Bandwidth of links: planned and measured",
            "Bps",
            (by_link("plan_link_bandwidth_bytes_per_second"), f"{link} planned"),
            (by_link("link_bandwidth_bytes_per_second"), f"{link} measured"),
            about="Bytes over seconds, of the last profiled step and of the plan.",
        ),
        bars(
            "Bytes of a step",
            "bytes",
            (by_link("link_bytes"), link),
            about="What each link carries in a step, by the plan's sizes.",
            span=4,
        ),
        rows_of(
            "Nodes of meshes",
            f"max by (mesh, nodes) (slotline_mesh_info{_JOB})",
            columns={"mesh": "Mesh", "nodes": "Nodes"},
            about="Where the workers of each mesh run.",
            span=4,
        ),
    ]


def _profiled() -> list[Any]:
    return [
        bars(
            "Compute time of each mesh",
            "s",
            (f"max by (mesh) (slotline_profiled_compute_seconds{_JOB})", "{{mesh}}"),
            about="Sum over all slots of the last profiled step, also those that are too many to be shown.",
        ),
        curves(
            "Seconds per action",
            "s",
            (f"max by (stage, action) (slotline_profiled_action_seconds{_JOB})", "{{stage}} {{action}}"),
            about="Mean length of a slot in the profiled steps, by stage and action.",
            span=12,
        ),
        number(
            "Slots not shown",
            "none",
            _max("profiled_slots_dropped"),
            about="Slots of the last profiled step that are too many for Prometheus; they are in all sums.",
        ),
    ]


def _keeping() -> list[Any]:
    return [
        bars(
            "Start of the attempt",
            "s",
            (f"max by (phase) (slotline_job_start_seconds{_JOB})", "control plane: {{phase}}"),
            (f"max by (phase) (slotline_launch_phase_seconds{_JOB})", "driver: {{phase}}"),
            about="queue: until it has accelerators; submit: until Ray has the driver; start: until it trains. Within it, "
            "and to the end of the first step, the driver's phases.",
        ),
        curves(
            "Age of the checkpoint",
            "s",
            (_max("checkpoint_age_seconds"), "age"),
            (_max("checkpoint_interval_seconds"), "interval"),
            about="So much training a lost worker would throw away; and how often the job saves, at its present speed.",
            span=4,
        ),
        bars(
            "Duration of checkpoints",
            "s",
            (f"max by (operation) (slotline_checkpoint_duration_seconds{_JOB})", "{{operation}}"),
            about="How long the last save and the last restore took; no step runs meanwhile.",
            span=4,
        ),
        curves(
            "Memory of meshes: planned and measured",
            "bytes",
            (f"max by (mesh) (slotline_planned_memory_bytes{_JOB})", "{{mesh}} planned"),
            (f"max by (mesh) (slotline_peak_memory_bytes{_JOB})", "{{mesh}} measured"),
            about="The most that a worker of each mesh holds.",
        ),
        curves(
            "GPU utilisation of workers",
            "percentunit",
            (f"max by (mesh, worker) (slotline_gpu_utilisation_ratio{_JOB})", "{{mesh}}/{{worker}}"),
            about="Share of time in which a kernel ran, by NVML; a receive that waits is a kernel too. Empty on CPU.",
            span=10,
        ),
        curves(
            "GPU memory of workers",
            "bytes",
            (f"max by (mesh, worker) (slotline_gpu_memory_used_bytes{_JOB})", "{{mesh}}/{{worker}} in use"),
            (
                f"max by (mesh, worker) (slotline_gpu_memory_total_bytes{_JOB})",
                "{{mesh}}/{{worker}} there is",
            ),
            about="Of all processes on the GPU, by NVML: also what torch keeps and what NCCL takes. Empty on CPU.",
            span=10,
        ),
        number(
            "Effective training time",
            "percentunit",
            _max("job_effective_training_ratio"),
            about="Share of the time since its first attempt began, waits included, that its steps took: without launches, "
            "checkpoints, evaluations and steps that were lost.",
        ),
    ]
