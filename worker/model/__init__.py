"""Cutting an nn.Module into pipeline stages, and the built-in models.

Exports are loaded on first use, so that `worker.model.profile` can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "trace": "tracing",
    "TracedModel": "tracing",
    "StageEdge": "stages",
    "StageGraph": "stages",
    "StageModule": "stages",
    "LayerProfile": "profile",
    "measure_layers": "measure",
    "build_model": "factory",
    "call_factory": "factory",
    "resolve": "factory",
    "CutError": "errors",
    "FactoryError": "errors",
    "ModelError": "errors",
    "TraceError": "errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
