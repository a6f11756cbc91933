"""`/metrics` of the control plane: jobs by state, queue depth, attempts by cause, its own process.

Counted in the store at each scrape: nothing accumulates here, so a restart loses nothing, and
no number carries a job or a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.api.context import Current
from service.store.counts import Counts, count

router = APIRouter(include_in_schema=False)


@router.get("/metrics")
async def metrics(service: Current) -> Response:
    """The metrics in Prometheus's text format."""
    counts = await count(service.database, tuple(service.settings.queues))
    return Response(exposition(counts), media_type=CONTENT_TYPE_LATEST)


def exposition(counts: Counts) -> bytes:
    """The text of one scrape; its registry is made and forgotten here."""
    registry = CollectorRegistry()
    registry.register(_Counted(counts))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Counted(Collector):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        yield _family(GaugeMetricFamily, "jobs", "Jobs by state.", "state", self._counts.jobs_by_state)
        yield _family(GaugeMetricFamily, "queue_depth", "Jobs that wait.", "queue", self._counts.queue_depth)
        yield _family(
            CounterMetricFamily,
            "attempts",
            "Ended attempts by cause.",
            "cause",
            self._counts.attempts_by_cause,
        )


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: dict[str, int],
) -> Metric:
    family = kind(f"slotline_{name}", text, labels=[label])
    for value, number in sorted(values.items()):
        family.add_metric([value], number)
    return family
