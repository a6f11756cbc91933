"""Extras of the package: the client is installed alone, and a verb that needs more names the extra that brings it.

`server` is what the control plane and the scheduler import, `worker` what runs models, `demo` both and its data. Verbs
import them inside their functions, so that all others, and --help, work without.
"""

from __future__ import annotations

from importlib.util import find_spec

from service.cli.output import CliError

MODULES_OF_EXTRA = {
    "server": (
        *(
            "aiosqlite",
            "alembic",
            "cryptography",
            "fastapi",
            "fsspec",
            "jinja2",
            "jwt",
            "numba",
            "numpy",
            "ortools",
        ),
        *(
            "prometheus_client",
            "psycopg",
            "python_multipart",
            "sqlalchemy",
            "sse_starlette",
            "starlette",
            "tenacity",
        ),
        "uvicorn",
    ),
    "worker": ("ray", "safetensors", "torch"),
    "demo": ("sklearn",),
}
"""Modules that the client alone does not bring, by the first extra that does."""


def require_extras(*extras: str, otherwise: str = "") -> None:
    """CliError with pip's command where a module of `extras` is missing; `otherwise` names another way out."""
    missing = [name for extra in extras for name in MODULES_OF_EXTRA[extra] if find_spec(name) is None]
    if missing:
        raise _not_installed(missing[0], ",".join(extras), otherwise)


def missing_package_error(error: ModuleNotFoundError) -> CliError | None:
    """The error that names the extra to install for a module that could not be imported; None for any other module."""
    name = (error.name or "").partition(".")[0]
    for extra, modules in MODULES_OF_EXTRA.items():
        if name in modules:
            return _not_installed(name, extra, "")
    return None


def _not_installed(module: str, extras: str, otherwise: str) -> CliError:
    return CliError(
        f"{module} is not installed, which this needs and the client alone does not: pip install 'slotline[{extras}]'"
        f"{otherwise}"
    )
