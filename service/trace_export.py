"""Whether and where spans are exported: by OpenTelemetry's own variables. Its packages are loaded only where one is set."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping

from service.tracing import Exporter, exported_to

logger = logging.getLogger(__name__)
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@contextlib.asynccontextmanager
async def exported(environment: Mapping[str, str] = os.environ) -> AsyncIterator[None]:
    """Export what is recorded within, where the environment names an endpoint and the packages are there."""
    exporter = _made(environment)
    try:
        with exported_to(exporter):
            yield
    finally:
        if exporter is not None:
            await asyncio.to_thread(exporter.close)


def _made(environment: Mapping[str, str]) -> Exporter | None:
    endpoint = next((name for name in ENDPOINTS if environment.get(name)), None)
    if endpoint is None or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if "otlp" not in environment.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        return None
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        logger.warning(
            "%s is set, but no traces are exported by %s: set %s to http/protobuf and the endpoint to the collector's "
            "port for it (4318)",
            endpoint,
            protocol,
            _PROTOCOLS[1],
        )
        return None
    try:
        from service.otlp import OtlpExporter
    except ImportError as error:
        logger.warning(
            "%s is set, but no traces are exported (%s): pip install 'slotline[otel]'", endpoint, error
        )
        return None
    try:
        return OtlpExporter()
    except Exception as error:  # a certificate that is not there, a number that is none
        logger.error("no traces are exported: %s: set OTEL_EXPORTER_OTLP_... right", error)
        return None
