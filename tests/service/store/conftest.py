"""Every module of the store is there, so that the code's tables are all known, whichever test runs alone."""

import importlib
import pkgutil

import service.store

for _module in pkgutil.iter_modules(service.store.__path__, "service.store."):
    if not _module.ispkg:
        importlib.import_module(_module.name)
