"""Import user-defined code by name: `path/to/file.py:attribute` or `module:attribute`.

In: the value of a setting such as `env.tools` or `cold_start.demonstrator`. Out: the named object.
Next: its user checks its kind (`tool/`, `env/`, `data/`, `cold_start/demonstrate.py`).

Importing a file runs it. So only a name that the user gave in this process, on the command line or
in a preset named there, is imported. The settings of a downloaded model or run may name any code.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from agent_r1.ground.errors import ConfigError, nearest
from agent_r1.ground.imports import import_attribute, import_by_name

_trusted_names: set[str] = set()


def is_user_code(name: str) -> bool:
    """Return whether a setting's value names user-defined code."""
    return ":" in name


def is_shipped(name: str) -> bool:
    """Return whether a name is of our own recipes, or of no code."""
    place = split_scheme(name)[1]
    return not is_user_code(name) or place.startswith("agent_r1_recipes.")


def split_scheme(name: str) -> tuple[str, str]:
    """Split `gym:FILE.py:NAME` into `gym` and `FILE.py:NAME`. The scheme is "" if there is none."""
    scheme, colon, place = name.partition(":")
    if colon and ":" in place and re.fullmatch(r"[a-z]{2,}", scheme):
        return scheme, place
    return "", name


def absolute(name: str, folder: Path) -> str:
    """Make the file of `name` absolute, seen from `folder`; a module's name does not change."""
    scheme, name = split_scheme(name)
    if scheme:
        return f"{scheme}:{absolute(name, folder)}"
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        return name
    return f"{(folder / os.path.expanduser(place)).resolve()}:{attribute}"


def trust(names: Iterable[str]) -> None:
    """Trust these names: the user gave them here or in the parent process."""
    _trusted_names.update(names)


def is_trusted(name: str) -> bool:
    """Return whether the user gave this name."""
    return name in _trusted_names


def check_trusted(name: str, setting: str) -> None:
    """Raise ConfigError unless the user named `name` here. Also used for shell commands."""
    if name not in _trusted_names:
        raise ConfigError(
            f"{setting}={name} is code that a run or a model named, not you; inspect it, and if "
            "you trust it, "
            f"name it yourself: {setting}={name} (or --preset FILE.yaml)",
            code="untrusted_code",
        )


def load_trusted(name: str, setting: str) -> Any:
    """Import the object called `name`, which `setting` names.

    Raises ConfigError if the user did not give the name, or, with file and line, if the code is
    missing or fails.
    """
    check_trusted(name, setting)
    if not re.fullmatch(r".+:\w+", name):
        raise ConfigError(
            f"{setting}={name!r} names no code; give FILE.py:NAME or MODULE:NAME",
            code="names_no_code",
        )
    return import_object(name, setting)


def import_object(name: str, setting: str) -> Any:
    """Import `name` (FILE.py:NAME or MODULE:NAME), which is trusted already.

    Our own code is imported as by an import statement: the working directory cannot replace a
    library, and an error keeps its traceback. User-defined code is also found in the working
    directory, and its errors are one line.
    """
    is_trusted = name in _trusted_names
    place, _, attribute = split_scheme(name)[1].rpartition(":")
    if not is_trusted and not place.endswith(".py"):
        return import_attribute(name)
    module = _import_module(place, setting)
    if not hasattr(module, attribute):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(
            f"{setting}: {place} has no {attribute!r}{nearest(attribute, public)}; it has "
            f"{_list(public)}",
            code="missing_attribute",
        )
    return getattr(module, attribute)


def _import_module(place: str, setting: str) -> Any:
    """Import a module or a file, whose folder joins sys.path for its own imports."""
    name = place
    path = None
    if "" not in sys.path:  # the installed command does not search the working directory
        sys.path.insert(0, "")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ConfigError(
                f"{setting}: there is no file {path}; give file.py:attribute or module:attribute",
                code="missing_code",
            )
        name = path.stem
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
    try:
        module = import_by_name(name)
    except Exception as error:
        raise ConfigError(
            f"{setting}: {error_location(error)}{type(error).__name__}: {error}", code="broken_code"
        ) from error
    if path is not None and Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise ConfigError(
            f"{setting}: {path} cannot be imported, because another module is called {name!r}; "
            "rename the file",
            code="name_taken",
        )
    return module


def error_location(error: BaseException) -> str:
    """Return `file, line 7: ` of the user's failing line, or nothing if there is none."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: "
    files = [split_scheme(name)[1].rpartition(":")[0] for name in _trusted_names if ".py:" in name]
    folders = {Path(file).parent for file in files}
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent in folders
    ]
    if not frames:
        return ""
    return f"{frames[-1].filename}, line {frames[-1].lineno}: "


def manifests() -> list[Traversable]:
    """List the tables of names: the core's, and one per recipe."""
    tables = [folder / "recipe.toml" for folder in recipe_folders()]
    return [
        resources.files("agent_r1.config") / "names.toml",
        *(table for table in tables if table.is_file()),
    ]


def recipe_folders() -> list[Path]:
    """List the folders of our recipes: recipes/ of a checkout, `agent_r1_recipes` of a wheel."""
    if importlib.util.find_spec("agent_r1_recipes") is None:
        return []
    # Its path, not `resources.files`: in a checkout the package's own file is not in recipes/.
    [place] = import_by_name("agent_r1_recipes").__path__
    folders = Path(place).iterdir()
    return sorted((folder for folder in folders if folder.is_dir()), key=lambda folder: folder.name)


def source_location(function: Any) -> str:
    """Return `file, line 7` where a function or class begins."""
    try:
        return f"{inspect.getsourcefile(function)}, line {inspect.getsourcelines(function)[1]}"
    except (OSError, TypeError):  # it is neither, or not from a file
        return f"{function!r:.60}"


def _list(names: list[str]) -> str:
    return ", ".join(names[:8]) or "nothing"


def code_hashes(names: Iterable[str]) -> dict[str, str]:
    """Map names of files with code of `names`, and of their imports, to SHA-256."""
    hashes: dict[str, str] = {}
    todo: list[Path] = []
    for name in names:
        if not is_user_code(name):
            continue
        path = _file_of(split_scheme(name)[1].rpartition(":")[0])
        if path:
            todo.append(path)
    while todo:
        path = todo.pop()
        if path.name in hashes or not path.is_file():
            continue
        code = path.read_bytes()
        hashes[path.name] = hashlib.sha256(code).hexdigest()
        todo += [path.parent / f"{module.rpartition('.')[2]}.py" for module in _imports(code)]
    return dict(sorted(hashes.items()))


def _file_of(place: str) -> Path | None:
    if place.endswith(".py"):
        return Path(place)
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin)


def _imports(code: bytes) -> set[str]:
    """List the modules that the code imports; none if it cannot be parsed."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names
