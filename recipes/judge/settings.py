"""The settings of a judge, and of a reward model."""

from pydantic import Field

from agent_r1 import EnvConfig, OutsideWhileDefault, Price, Trusted


class JudgeSettings(EnvConfig):
    judge_url: Price[Trusted[str | None]] = None
    """env.reward=judge: address of the OpenAI-compatible server, such as
    http://127.0.0.1:8000/v1."""
    judge_model: Price[str] = "judge"
    """Name of the model on that server."""
    judge_max_tokens: Price[int] = 1024
    """Tokens of a reply. A number needs two; a model that thinks first needs hundreds."""


class RewardModelSettings(EnvConfig):
    reward_model_url: OutsideWhileDefault[Price[Trusted[str | None]]] = None
    """env.reward=reward_model: address of its endpoint, such as http://127.0.0.1:8000/classify
    (vLLM; also /pooling) or http://127.0.0.1:8080/predict (TEI)."""
    reward_model: OutsideWhileDefault[Price[str | None]] = None
    """Name of the model on that server; unset: the one that it serves."""
    reward_model_template: OutsideWhileDefault[Price[str | None]] = Field(
        None, pattern=r"\{answer\}"
    )
    """What the model reads, with {question} and {answer}: the model's chat template. Unset: both
    texts, each on its own lines."""
    reward_model_raw: OutsideWhileDefault[Price[bool]] = False
    """Take the number before the sigmoid or softmax. Otherwise the reward lies between 0 and 1."""
    reward_model_label: OutsideWhileDefault[Price[str | None]] = None
    """Which class counts, if the model has several: its name with TEI, its position with vLLM."""
