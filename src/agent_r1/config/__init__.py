"""One configuration: `settings.py` has every setting, `load.py` fills them, and `tables.py`, `recipes.py` and
`own.py` find what names name.

The names of `load.py` below can be imported from here, and are loaded when asked for.
"""

from typing import Any

LOADED = (
    "ALGORITHMS", "ENGINES", "Config", "all_code", "changed", "fingerprint", "from_yaml", "load_config", "own_names",
    "preset_names", "preset_title", "to_yaml", "trusted", "user_code", "what_counts",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in LOADED:
        raise AttributeError(f"module 'agent_r1.config' has no attribute {name!r}")
    from agent_r1.config.own import imported

    return imported(f"agent_r1.config.load:{name}", "import")
