"""Load the configuration: `settings.py` has the settings, `load.py` fills them.

`presets.py` finds presets, `tables.py` resolves names, and `plugins.py` imports the code that is
trusted. The names of `load.py` below are imported when first used.
"""

from typing import Any

from agent_r1.ground.imports import import_attribute

LAZY_NAMES = (
    "ALGORITHMS",
    "ENGINES",
    "Config",
    "all_code",
    "apply_overrides",
    "fingerprint",
    "from_yaml",
    "keep_choices",
    "keep_spelling",
    "load_config",
    "user_code_names",
    "preset_names",
    "preset_title",
    "shareable",
    "to_yaml",
    "trusted_settings",
    "user_code",
    "fingerprint_values",
)


def __getattr__(name: str) -> Any:
    if name not in LAZY_NAMES:
        raise AttributeError(f"module 'agent_r1.config' has no attribute {name!r}")
    return import_attribute(f"agent_r1.config.load:{name}")
