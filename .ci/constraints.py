"""Print the versions of the default installation, also of packages that others need.

    .venv/bin/python .ci/constraints.py > requirements/constraints.txt

Run it in an environment that `make install` made and whose tests passed. It starts from the
packages of requirements/cpu.txt and follows what each of them requires on this machine.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

CPU = Path(__file__).parents[1] / "requirements" / "cpu.txt"
HEAD = """\
# Every package of the default installation (cpu.txt and what it requires), at the version that was
# tested. cpu.txt names this file. Made by: .venv/bin/python .ci/constraints.py
"""


def normal_name(name: str) -> str:
    """Spell a package's name as indexes do."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements_of(text: str) -> list[Requirement]:
    """Read a requirements file, without its options and comments."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def applies(requirement: Requirement, extras: set[str]) -> bool:
    """Tell whether a requirement holds on this machine, with or without extras."""
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""})


def installed_versions(roots: list[Requirement]) -> dict[str, str]:
    """Map each package that `roots` bring, directly or not, to its version here."""
    versions: dict[str, str] = {}
    todo = [root for root in roots if applies(root, set())]
    visited = set()
    while todo:
        requirement = todo.pop()
        name = normal_name(requirement.name)
        request = (name, frozenset(requirement.extras))
        if request in visited:
            continue
        visited.add(request)
        package = metadata.distribution(name)
        # `2.13.0+cpu` is a build from another index; the constraint must fit each machine.
        versions[name] = package.version.partition("+")[0]
        for line in package.requires or []:
            needed = Requirement(line)
            if applies(needed, requirement.extras):
                todo.append(needed)
    return versions


def page(versions: dict[str, str]) -> str:
    """Write the file."""
    return HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


if __name__ == "__main__":
    print(page(installed_versions(requirements_of(CPU.read_text()))), end="")
