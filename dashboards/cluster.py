"""The dashboard of the cluster: who runs, who waits and why it pays, and the GPUs where DCGM's exporter tells them."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.models import dashboard as models
from panels import board, curves, data_link, rows_of, with_rows

# Several control planes tell the same jobs: each number is taken once (max by), and summed after that.
_INFO = "max by (job, name, owner, queue, state, attempt) (slotline_job_info)"
_NAMED = "group_left (name) max by (job, name) (slotline_job_info)"
_HOUR = "[1h]"


def build() -> models.Dashboard:
    built = (
        board("Slotline: cluster", "slotline-cluster", "All jobs: queues, attempts, accelerators.")
        .refresh("30s")
        .time("now-6h", "now")
        .timezone("browser")
    )
    return with_rows(
        built, [("Jobs", _jobs()), ("Accelerators", _accelerators()), ("GPUs (DCGM exporter)", _gpus())]
    )


def _jobs() -> list[Any]:
    job = (
        "/d/slotline-job?var-name=${__data.fields.Name}&var-job=${__data.fields.Job}&${datasource:queryparam}"
    )
    return [
        curves(
            "Jobs by state",
            "short",
            ("max by (state) (slotline_jobs)", "{{state}}"),
            stacked=True,
            about="Jobs in the control plane's store, by state.",
        ),
        curves(
            "Queue depth",
            "short",
            ("max by (queue) (slotline_queue_depth)", "{{queue}}"),
            about="Jobs that wait, by queue.",
        ),
        curves(
            "Longest wait now",
            "s",
            ("max by (queue) (slotline_queue_oldest_wait_seconds)", "{{queue}}"),
            about="How long the first of the jobs that wait has waited.",
        ),
        curves(
            "Wait for the first attempt",
            "s",
            *(
                (
                    f"histogram_quantile({share}, max by (queue, le) "
                    f"(increase(slotline_queue_wait_seconds_bucket{_HOUR})))",
                    f"{{{{queue}}}} {name}",
                )
                for share, name in ((0.5, "median"), (0.95, "95 %"))
            ),
            about="Of the jobs that started within the hour before, from submission to the first attempt.",
        ),
        curves(
            "Attempts ended in the last hour",
            "short",
            (f"max by (cause) (increase(slotline_attempts_total{_HOUR}))", "{{cause}}"),
            about="Ended attempts by cause: infrastructure, user, preemption, or a good end.",
        ),
        curves(
            "Attempts of a job",
            "short",
            (
                f"max by (job) (slotline_job_attempts) * on (job) {_NAMED}",
                "{{name}}",
            ),
            about="How often each job that is not over was started: many is a job that fails again and again.",
        ),
        rows_of(
            "Jobs that are not over",
            _INFO,
            columns={
                "name": "Name",
                "owner": "Owner",
                "queue": "Queue",
                "state": "State",
                "attempt": "Attempt",
                "job": "Job",
            },
            about="Each job with a link to its dashboard.",
        ).data_links([data_link("Open the job", job)]),
    ]


def _accelerators() -> list[Any]:
    idle = f"sum by (reason) (increase(slotline_idle_accelerator_seconds_total{_HOUR})) / 3600"
    whole = f"sum(increase(slotline_accelerator_seconds_total{_HOUR})) / 3600"
    by_job = f"sum by (job) (rate(slotline_{{}}_total[$__rate_interval])) * on (job) {_NAMED}"
    return [
        curves(
            "Accelerator-hours of the last hour",
            "h",
            (f"{whole} - sum({idle})", "computing"),
            (idle, "{{reason}}"),
            stacked=True,
            about="What jobs made of their accelerators: computing, and idle time by reason, within their steps.",
        ),
        curves(
            "Samples per second",
            "short",
            (by_job.format("samples"), "{{name}}"),
            about="Samples that each job trains on.",
        ),
        curves(
            "Tokens per second",
            "short",
            (by_job.format("tokens"), "{{name}}"),
            about="Tokens that each job trains on, where its samples are sequences of tokens.",
        ),
    ]


def _gpus() -> list[Any]:
    gpu = "{{Hostname}} GPU {{gpu}}"
    return [
        curves(
            "GPU utilisation",
            "percent",
            ("max by (Hostname, gpu) (DCGM_FI_DEV_GPU_UTIL)", gpu),
            span=12,
            about="Share of time in which a kernel ran, by NVIDIA's DCGM exporter; empty where none is scraped.",
        ),
        curves(
            "GPU memory in use",
            "mbytes",
            ("max by (Hostname, gpu) (DCGM_FI_DEV_FB_USED)", gpu),
            span=12,
            about="Frame buffer in use, in MiB, by NVIDIA's DCGM exporter; empty where none is scraped.",
        ),
    ]
