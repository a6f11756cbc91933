"""Where a driver serves its metrics: at a port of the range that a firewall lets Prometheus reach.

The range comes as SLOTLINE_METRICS_PORTS, first-last; without one any port will do.
"""

from __future__ import annotations

import errno
import logging

from worker.driver.metrics import JobMetrics

log = logging.getLogger(__name__)


def port_range(text: str) -> range:
    """The ports of "first-last"; none for an empty text."""
    if not text:
        return range(0)
    first, _, last = text.partition("-")
    try:
        found = range(int(first), int(last) + 1)
    except ValueError:
        found = range(0)
    if not found or found[0] < 1 or found[-1] > 65535:
        raise ValueError(
            f"SLOTLINE_METRICS_PORTS is {text!r}: give the first and the last port, e.g. 9400-9499"
        )
    return found


def serve_in_range(metrics: JobMetrics, host: str, text: str) -> str:
    """Serve at the first free port of the range and return "host:port".

    Where all are taken it is any port: training goes on, and Prometheus may be kept out; the log says so.
    """
    ports = port_range(text)
    for port in ports:
        try:
            return metrics.serve(host=host, port=port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    endpoint = metrics.serve(host=host, port=0)
    if ports:
        log.warning(
            "all ports of SLOTLINE_METRICS_PORTS=%s are taken here: metrics are at %s, where a NetworkPolicy may keep "
            "Prometheus out; widen the range (monitoring.jobs.ports of the chart)",
            text,
            endpoint,
        )
    return endpoint
