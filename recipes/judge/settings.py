"""The settings of a judge."""

from agent_r1 import EnvConfig, Price, Trusted


class JudgeSettings(EnvConfig):
    judge_url: Price[Trusted[str | None]] = None
    """env.reward=judge: address of the OpenAI-compatible server, such as
    http://127.0.0.1:8000/v1."""
    judge_model: Price[str] = "judge"
    """Name of the model on that server."""
    judge_max_tokens: Price[int] = 1024
    """Tokens of a reply. A number needs two; a model that thinks first needs hundreds."""
