"""Score an answer with a reward model on a server. In: question and answer. Out: one number.

The last part of the address says which form the server speaks:

    classify    vLLM: {"input": [text, ...]} -> {"data": [{"index": 0, "probs": [.9]}, ...]}
    pooling     vLLM: the same request -> {"data": [{"index": 0, "data": [.9]}, ...]}
    predict     TEI: {"inputs": [[text], ...]} -> [[{"score": .9, "label": "good"}], ...]

vLLM's forms are those of release 0.27, and TEI's those of Text Embeddings Inference 1.9. Answers
that wait together are one request (service.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from agent_r1 import AgentR1Error, Row
from agent_r1_recipes.judge.service import ScoreService, break_control_tokens, finite
from agent_r1_recipes.judge.settings import RewardModelSettings

MAX_SCORED_CHARS = 4000
"""Of an answer. A question comes from the data, and is sent whole."""
BATCH = 64
"""Texts of a request."""
TEMPLATE = "{question}\n{answer}"
"""What a model without a chat template reads."""
KEY = "AGENT_R1_REWARD_MODEL_KEY"
"""The environment variable that may hold the server's key."""

Case = tuple[str, str]
"""Question and answer."""


class RewardModel:
    """Ask a reward model for the score of each case, once."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        template: str | None = None,
        raw: bool = False,
        label: str | None = None,
    ):
        url = url.rstrip("/")
        path = url.rpartition("/")[2]
        if path not in FORMS:
            raise AgentR1Error(
                f"env.reward_model_url={url} has no known form; let it end in "
                f"{', '.join(f'/{name}' for name in FORMS)}",
                code="bad_address",
            )
        self.model = model
        self.template = template or TEMPLATE
        self.raw = raw
        self.label = label
        self.in_vllm = path != "predict"
        self._scores_of: Callable[[Any], list[list[tuple[str, Any]]]] = FORMS[path]
        self.service = ScoreService("the reward model", url, KEY, self._request, self._read, BATCH)

    async def score(self, question: str, answer: str) -> float:
        """Return the model's number. Raises AgentR1Error without a finite one."""
        return await self.service.score((question, answer[:MAX_SCORED_CHARS]))

    def text_of(self, case: Case) -> str:
        """Write a case as the model reads it."""
        # Neither text may end its own turn or begin another: the server would read its control
        # tokens. A blank after the first character keeps them apart from the template's.
        question, answer = (break_control_tokens(text) for text in case)
        before, _, after = self.template.partition("{answer}")
        return before.replace("{question}", question) + answer + after

    def _request(self, cases: list[Case]) -> dict[str, Any]:
        texts = [self.text_of(case) for case in cases]
        if not self.in_vllm:
            return {"inputs": [[text] for text in texts], "raw_scores": self.raw, "truncate": True}
        request: dict[str, Any] = {"input": texts, "use_activation": not self.raw}
        if self.model:
            request["model"] = self.model
        return request

    def _read(self, answer: Any, cases: list[Case]) -> list[float | Exception]:
        """Return each case's number, or why it has none."""
        scores: list[float | Exception] = []
        for entry in self._scores_of(answer):
            try:
                scores.append(finite(self._select(entry)))
            except ValueError as error:
                scores.append(error)
        return scores

    def _select(self, entry: list[tuple[str, Any]]) -> Any:
        """Return the number of the one class, or of `env.reward_model_label`."""
        labels = [label for label, _ in entry]
        if self.label is None and len(entry) == 1:
            return entry[0][1]
        if self.label is None or labels.count(self.label) != 1:
            raise ValueError(
                f"it has {len(labels)} classes; set env.reward_model_label to one of "
                f"{', '.join(labels[:10])}"
            )
        return dict(entry)[self.label]


def _read_classes(answer: Any) -> list[list[tuple[str, Any]]]:
    """Read vLLM's classes: a position, from 0, is a class's name."""
    return [_number_classes(entry["probs"]) for entry in _in_order(answer)]


def _read_pooling(answer: Any) -> list[list[tuple[str, Any]]]:
    """Read vLLM's pooled numbers.

    A model that scores each token has a list a token. The last token has read the whole text.
    """
    entries = []
    for entry in _in_order(answer):
        numbers = entry["data"]
        if numbers and isinstance(numbers[0], list):
            numbers = numbers[-1]
        entries.append(_number_classes(numbers))
    return entries


def _in_order(answer: Any) -> list[dict[str, Any]]:
    return sorted(answer["data"], key=lambda entry: entry["index"])


def _number_classes(numbers: list[Any]) -> list[tuple[str, Any]]:
    if not isinstance(numbers, list):
        raise ValueError(f"{numbers!r:.40} is no list of numbers")
    return [(str(position), number) for position, number in enumerate(numbers)]


def _read_predictions(answer: Any) -> list[list[tuple[str, Any]]]:
    """Read TEI's classes, which come with their names."""
    return [[(str(one["label"]), one["score"]) for one in entry] for entry in answer]


FORMS = {"classify": _read_classes, "pooling": _read_pooling, "predict": _read_predictions}
"""Last part of the address -> how its answer is read."""


async def reward(answer: str, targets: list[str], row: Row, config: RewardModelSettings) -> float:
    """Pay what the reward model at `env.reward_model_url` says."""
    model = _model_at(
        config.reward_model_url or "",
        config.reward_model,
        config.reward_model_template,
        config.reward_model_raw,
        config.reward_model_label,
    )
    return await model.score(row["prompt"][-1]["content"], answer)


@functools.cache
def _model_at(
    url: str, model: str | None, template: str | None, raw: bool, label: str | None
) -> RewardModel:
    return RewardModel(url, model, template, raw, label)
