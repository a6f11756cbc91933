"""What can be wrong with a user's model or factory. Light: no torch at import."""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be built, traced or cut; the message says what to change."""


class FactoryError(ModelError):
    """An import path that leads nowhere, or a factory that returns or raises the wrong thing."""


class TraceError(ModelError):
    """A model that torch.export cannot trace, or whose graph has no pipeline form."""


class CutError(ModelError):
    """A cut that the model does not admit: too many stages, unknown or unordered names."""
