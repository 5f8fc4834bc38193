"""The settings of a judge."""

from agent_r1 import EnvConfig, Trusted


class JudgeSettings(EnvConfig):
    judge_url: Trusted[str | None] = None
    """env.reward=judge: address of the OpenAI-compatible server, such as
    http://127.0.0.1:8000/v1."""
    judge_model: str = "judge"
    """Name of the model on that server."""
    judge_max_tokens: int = 1024
    """Tokens of a reply. A number needs two; a model that thinks first needs hundreds."""
