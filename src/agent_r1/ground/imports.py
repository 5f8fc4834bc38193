"""Import code by its name. All of it passes here, because such an import hides an arrow."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


def import_by_name(name: str) -> ModuleType:
    return importlib.import_module(name)


def import_attribute(name: str) -> Any:
    """Return the object of MODULE:NAME. Errors keep their traceback."""
    module, _, attribute = name.rpartition(":")
    return getattr(import_by_name(module), attribute)
