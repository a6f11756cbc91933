"""The driver's metrics, read back over HTTP with Prometheus's own parser."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from worker.driver.metrics import DriverMetrics, ModelFlops
from worker.driver.slot_metrics import MAX_SLOTS
from worker.driver.step_measurement import StepScaling, StepUsage
from worker.machine.telemetry import GpuUsage

STARTED_AT = 1_790_000_000.25


@pytest.fixture
def metrics():
    made = DriverMetrics("job-1")
    yield made
    made.close()


def scrape(endpoint: str, path: str = "/metrics") -> dict[tuple[str, frozenset], float]:
    with urllib.request.urlopen(f"http://{endpoint}{path}", timeout=10) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        text = response.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples, f"{key} twice: Prometheus would drop one"
            samples[key] = sample.value
    return samples


def scrape_slots(endpoint: str) -> dict[tuple[str, frozenset], float]:
    return scrape(endpoint, "/metrics/slots")


def value(samples: dict, name: str, **labels: str) -> float:
    return samples[f"slotline_{name}", frozenset({"job": "job-1", **labels}.items())]


def named(samples: dict, name: str) -> dict[frozenset, float]:
    return {labels: number for (n, labels), number in samples.items() if n == f"slotline_{name}"}


def slot(start_s: float, end_s: float, **fields: object) -> dict:
    base = {"mesh": "m0", "lane": "compute", "action": "F", "stage": "s0", "microbatch": 0}
    return {**base, "start_s": start_s, "end_s": end_s, **fields}


def test_a_step_is_read_back_with_its_units(metrics):
    endpoint = metrics.serve()
    for number, seconds in enumerate((0.2, 0.4), start=1):
        metrics.observe_step(
            {
                "step": number,
                "loss": 3.5 - number,
                "metrics": {"accuracy": number / 4, "none": None},
                "step_s": seconds,
                "makespan_s": seconds / 2,
                "bubble_ratio": 0.25,
                "exposed_transfer_s": 0.01,
                "overlap_ratio": None,
                "grad_norm": 1.5,
                "started_at": STARTED_AT,
                "peak_memory_bytes": {"m0": 100 * number, "m1": 7},
            }
        )
    metrics.observe_evaluation({"step": 2, "loss": 0.75, "metrics": {"accuracy": 0.25, "none": None}})
    metrics.set_planned_memory({"m0": 150, "m1": 10})
    metrics.set_plan({"makespan_s": 0.15, "bubble_ratio": 0.2, "slots": []}, step_s=0.17)
    got = scrape(endpoint)
    assert value(got, "plan_step_seconds") == 0.17
    assert value(got, "step_seconds_sum") == pytest.approx(0.6)
    assert value(got, "step_seconds_count") == 2
    assert value(got, "step_seconds_bucket", le="0.25") == 1
    assert value(got, "train_loss") == 1.5
    assert {dict(labels)["name"]: number for labels, number in named(got, "job_metric").items()} == {
        "accuracy": 0.5
    }
    assert value(got, "step") == 2
    assert value(got, "grad_norm") == 1.5
    assert value(got, "evaluation_loss") == 0.75
    assert list(named(got, "evaluation_metric").values()) == [0.25], "one that is no number has no series"
    assert [value(got, "peak_memory_bytes", mesh=mesh) for mesh in ("m0", "m1")] == [200, 7]
    assert [value(got, "planned_memory_bytes", mesh=mesh) for mesh in ("m0", "m1")] == [150, 10]
    assert (value(got, "makespan_seconds"), value(got, "plan_makespan_seconds")) == (0.2, 0.15)
    assert (value(got, "bubble_ratio"), value(got, "plan_bubble_ratio")) == (0.25, 0.2)
    assert value(got, "exposed_transfer_seconds") == 0.01
    assert named(got, "overlap_ratio") == {}, "a value that was not measured must not read as 0"


def test_slots_of_the_profiled_step_stand_at_their_unix_time(metrics):
    endpoint = metrics.serve()
    metrics.set_timeline(
        {
            "step": 20,
            "started_at": STARTED_AT,
            "uncertainty_s": 1e-5,
            "slots": [
                slot(0.0, 0.01),
                slot(0.01, 0.015, lane="send:m1", action="SEND_F", edge=0),
                slot(0.5, 0.6, stage=None, microbatch=None, action="STEP"),
            ],
        }
    )
    got = scrape_slots(endpoint)
    send = {
        "mesh": "m0",
        "row": "m00 send:m1",
        "lane": "send:m1",
        "stage": "s0",
        "action": "SEND_F",
        "microbatch": "0",
    }
    assert value(got, "slot_start_timestamp_seconds", **send) == pytest.approx(STARTED_AT + 0.01, abs=1e-6)
    assert value(got, "slot_duration_seconds", **send) == pytest.approx(0.005)
    step = {
        "mesh": "m0",
        "row": "m00 compute",
        "lane": "compute",
        "stage": "",
        "action": "STEP",
        "microbatch": "",
    }
    assert value(got, "slot_duration_seconds", **step) == pytest.approx(0.1)
    assert (value(got, "slots_step"), value(got, "slots_start_timestamp_seconds")) == (20, STARTED_AT)
    assert value(got, "action_seconds_sum", stage="s0", action="F") == pytest.approx(0.01)


def test_a_new_profiled_step_replaces_the_old_one_whole(metrics):
    endpoint = metrics.serve()
    metrics.set_timeline(
        {"step": 10, "started_at": 1.0, "slots": [slot(0, 1, microbatch=m) for m in range(8)]}
    )
    metrics.set_timeline({"step": 20, "started_at": 2.0, "slots": [slot(0, 1, microbatch=0)]})
    got = scrape_slots(endpoint)
    assert list(named(got, "slot_start_timestamp_seconds").values()) == [2.0]
    assert value(got, "action_seconds_count", stage="s0", action="F") == 9, (
        "what accumulates keeps both steps"
    )


def test_two_tensors_between_the_same_stages_stay_two_series(metrics):
    endpoint = metrics.serve()
    sends = [slot(e, e + 1, lane="send:m1", action="SEND_F", edge=e) for e in range(2)]
    metrics.set_timeline({"step": 1, "started_at": 0.0, "slots": [slot(0, 1), *sends]})
    starts = named(scrape_slots(endpoint), "slot_start_timestamp_seconds")
    assert sorted(dict(labels).get("edge", "") for labels in starts) == ["", "0", "1"]


@pytest.mark.slow
def test_at_most_4096_slots_are_exposed_and_the_rest_is_counted_and_in_all_sums(metrics):
    """A sum over the exposed slots would shrink to what is exposed."""
    endpoint = metrics.serve()
    slots = [slot(m, m + 1, microbatch=m) for m in reversed(range(MAX_SLOTS + 5))]
    late = slot(MAX_SLOTS + 5, MAX_SLOTS + 7, mesh="m1", action="B", stage="s1")
    metrics.set_timeline({"step": 1, "started_at": 0.0, "slots": [*slots, late]})
    starts = named(scrape_slots(endpoint), "slot_start_timestamp_seconds")
    assert len(starts) == 4096
    assert max(starts.values()) == 4095, "the earliest slots are kept"
    got = scrape(endpoint)
    assert value(got, "profiled_slots_dropped") == 6
    assert value(got, "profiled_step_seconds") == MAX_SLOTS + 7
    assert value(got, "profiled_compute_seconds", mesh="m0") == MAX_SLOTS + 5
    assert value(got, "profiled_compute_seconds", mesh="m1") == 2, "though none of its slots is exposed"
    assert value(got, "profiled_action_seconds", stage="s1", action="B") == 2


@pytest.mark.slow
def test_the_plan_has_its_slots_beside_the_measured_ones_and_its_own_count_of_what_is_left_out(metrics):
    endpoint = metrics.serve()
    slots = [slot(m, m + 0.5, microbatch=m) for m in range(MAX_SLOTS + 2)]
    metrics.set_plan({"makespan_s": 1.0, "bubble_ratio": 0.0, "meshes": [{"name": "m0"}], "slots": slots})
    starts = named(scrape_slots(endpoint), "plan_slot_start_seconds")
    assert sorted(starts.values()) == list(range(4096))
    assert value(scrape(endpoint), "plan_slots_dropped") == 2
    assert {dict(labels)["row"] for labels in starts} == {"m00 compute"}


def test_single_slots_are_not_in_the_endpoint_that_is_scraped_often(metrics):
    """Thousands of series that come and go with every profiled step: they have an endpoint and a pace of their own."""
    endpoint = metrics.serve()
    slots = [slot(m, m + 1, microbatch=m) for m in range(1000)]
    metrics.set_plan({"makespan_s": 1.0, "bubble_ratio": 0.0, "meshes": [{"name": "m0"}], "slots": slots})
    metrics.set_timeline({"step": 1, "started_at": 0.0, "slots": slots})
    often, seldom = scrape(endpoint), scrape_slots(endpoint)
    assert len(often) < 100 < 4000 <= len(seldom)
    assert not [name for (name, labels) in often if "microbatch" in dict(labels)]
    assert not {key for key in often if key in seldom}, "Prometheus would take two values for one series"
    assert not {name for name, _ in often} & {name for name, _ in seldom}


def test_what_was_idle_and_trained_on_adds_up(metrics):
    endpoint = metrics.serve()
    for _ in range(3):
        metrics.observe_usage(StepUsage(8.0, {"fill": 1.0, "waits": 0.5}, samples=16, tokens=None))
    got = scrape(endpoint)
    assert value(got, "accelerator_seconds_total") == 24
    assert value(got, "idle_accelerator_seconds_total", reason="fill") == 3
    assert value(got, "samples_total") == 48
    assert named(got, "tokens_total") == {}, "no tokens is not 0 tokens"
    metrics.observe_usage(StepUsage(8.0, {}, samples=16, tokens=512))
    assert value(scrape(endpoint), "tokens_total") == 512


def test_a_loss_scale_is_shown_and_skipped_steps_are_counted_by_reason(metrics):
    endpoint = metrics.serve()
    metrics.observe_scaling(StepScaling(None, overflowed=False, not_finite=True))
    assert named(scrape(endpoint), "loss_scale") == {}, "no loss scale is not 0"
    metrics.observe_scaling(StepScaling(1024.0, overflowed=True, not_finite=False))
    metrics.observe_scaling(StepScaling(512.0, overflowed=False, not_finite=False))
    got = scrape(endpoint)
    assert value(got, "loss_scale") == 512
    assert value(got, "skipped_steps_total", reason="overflow") == 1
    assert value(got, "skipped_steps_total", reason="not_finite") == 1


def test_where_a_mesh_runs_and_how_long_starting_and_saving_took(metrics):
    endpoint = metrics.serve()
    metrics.set_nodes("m0", ["a", "a", "b"])
    metrics.add_launch_phase("plan", 2.0)
    metrics.add_launch_phase("plan", 0.5)
    metrics.set_checkpoint("save", 4.0)
    got = scrape(endpoint)
    assert value(got, "mesh_info", mesh="m0", nodes="a, b") == 1
    assert value(got, "launch_phase_seconds", phase="plan") == 2.5
    assert value(got, "checkpoint_duration_seconds", operation="save") == 4


def test_a_scrape_never_mixes_two_profiled_steps(metrics):
    endpoint = metrics.serve()
    done = threading.Event()

    def profile() -> None:
        step = 0
        while not done.is_set():
            step += 1
            metrics.set_timeline(
                {
                    "step": step,
                    "started_at": float(step),
                    "slots": [slot(0, 1, microbatch=m) for m in range(50)],
                }
            )

    thread = threading.Thread(target=profile)
    thread.start()
    seen = set()
    try:
        while len(seen) < 10:  # pytest's own limit ends this if the steps never change
            got = scrape_slots(endpoint)
            if not named(got, "slots_step"):
                continue
            step = value(got, "slots_step")
            assert set(named(got, "slot_start_timestamp_seconds").values()) == {step}
            seen.add(step)
    finally:
        done.set()
        thread.join()


def test_two_jobs_in_one_process_share_nothing(metrics):
    other = DriverMetrics("job-2")
    try:
        first, second = metrics.serve(), other.serve()
        metrics.observe_step({"step": 1, "loss": 1.0})
        assert value(scrape(first), "train_loss") == 1.0
        assert named(scrape(second), "train_loss") == {}
    finally:
        other.close()


def test_series_linger_and_are_gone_after_close():
    metrics = DriverMetrics("job-1")
    endpoint = metrics.serve()
    metrics.observe_step({"step": 1, "loss": 1.0, "step_s": 0.1, "learning_rate": 0.25})
    metrics.set_timeline({"step": 1, "started_at": 0.0, "slots": [slot(0, 1)]})
    closing = threading.Thread(target=metrics.close, kwargs={"linger_s": 3600.0})
    closing.start()
    assert value(scrape(endpoint), "train_loss") == 1.0, "a lingering job can still be scraped"
    assert value(scrape(endpoint), "learning_rate") == 0.25
    metrics.close()
    closing.join(timeout=60)
    assert not closing.is_alive(), "a second close ends the linger"
    with pytest.raises(urllib.error.URLError):
        scrape(endpoint)
    assert [sample for family in metrics.registry.collect() for sample in family.samples] == []


def test_serving_twice_is_refused(metrics):
    metrics.serve()
    with pytest.raises(RuntimeError, match="served already"):
        metrics.serve()


def test_a_step_can_be_looked_up_from_its_time_by_who_reads_openmetrics(metrics):
    """Prometheus asks so; who asks for plain text has none, as that format knows no exemplars."""
    endpoint = metrics.serve()
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    metrics.observe_step({"step": 7, "step_s": 0.2}, {"trace_id": trace, "span_id": "1" * 16, "step": "7"})
    metrics.observe_step({"step": 8, "step_s": 2.0}, {})
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2"
    with urllib.request.urlopen(
        urllib.request.Request(f"http://{endpoint}/metrics", headers={"Accept": accept})
    ) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        text = answer.read().decode()
    buckets = {
        sample.labels["le"]: sample.exemplar
        for family in openmetrics_families(text)
        if family.name == "slotline_step_seconds"
        for sample in family.samples
        if sample.name.endswith("_bucket") and sample.exemplar
    }
    assert {le: (one.labels, one.value) for le, one in buckets.items()} == {
        "0.25": ({"trace_id": trace, "span_id": "1" * 16, "step": "7"}, 0.2)
    }
    plain = urllib.request.urlopen(f"http://{endpoint}/metrics")
    assert plain.headers["Content-Type"].startswith("text/plain") and trace not in plain.read().decode()


def test_the_models_operations_a_second_are_told_and_mfu_where_the_peak_is_known(metrics):
    endpoint = metrics.serve()
    metrics.observe_step({"step": 1, "step_s": 0.5})
    assert not named(scrape(endpoint), "model_flops_per_second"), "nothing is known yet"
    metrics.set_model_flops(ModelFlops(10**12))
    metrics.observe_step({"step": 2, "step_s": 0.5})
    got = scrape(endpoint)
    assert value(got, "model_flops_per_second") == 2e12
    assert not named(got, "mfu") and not named(got, "peak_flops_per_second")
    metrics.set_model_flops(ModelFlops(10**12, 8e12))
    metrics.observe_step({"step": 3, "step_s": 0.25})
    got = scrape(endpoint)
    assert (value(got, "model_flops_per_second"), value(got, "mfu")) == (4e12, 0.5)
    assert value(got, "peak_flops_per_second") == 8e12


def test_gpus_of_workers_are_told_as_nvml_has_them(metrics):
    endpoint = metrics.serve()
    assert not named(scrape(endpoint), "gpu_utilisation_ratio")
    metrics.observe_gpus({("m1", 0): GpuUsage(0.5, 1 << 30, 8 << 30), ("m1", 1): GpuUsage(0.0, 7, 9)})
    got = scrape(endpoint)
    assert value(got, "gpu_utilisation_ratio", mesh="m1", worker="0") == 0.5
    assert value(got, "gpu_memory_used_bytes", mesh="m1", worker="0") == 1 << 30
    assert value(got, "gpu_memory_total_bytes", mesh="m1", worker="1") == 9
