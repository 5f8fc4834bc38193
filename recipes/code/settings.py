"""Declare the setting of model-written code."""

import re
from typing import Annotated

from pydantic import AfterValidator

from agent_r1 import EnvConfig, OutsideFingerprint, Trusted


def _sandbox(place: str) -> str:
    if place not in ("auto", "unconfined") and not re.fullmatch(r"https?://[^/\s]+/?", place):
        raise ValueError(
            "choose auto or unconfined, or give the address of a SandboxFusion server, as "
            "http://127.0.0.1:8080"
        )
    return place


class CodeSettings(EnvConfig):
    sandbox: OutsideFingerprint[Trusted[Annotated[str, AfterValidator(_sandbox)]]] = "auto"
    """Where model-written code runs. auto: confined by this machine's kernel, or refused
    (docs/safety.md) | http://HOST:PORT of a SandboxFusion server | unconfined: with your rights,
    over your files."""
