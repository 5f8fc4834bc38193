"""GSM8K and DAPO-Math: the published form of one problem, and where each set is.

In: what a file or the hub holds. Out: a `Record`. Next: `Dataset` of recipes/multihopqa reads,
checks and deals them out.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, model_validator

from agent_r1_recipes.multihopqa.forms import NonEmptyText, Record
from agent_r1_recipes.multihopqa.published import Dataset


class Gsm8kProblem(BaseModel):
    """Parse GSM8K (Cobbe et al. 2021): word problems, with marked calculations in the solution.

        {"question": "...", "answer": "He buys 3*4=<<3*4=12>>12 apples.\\nSo there are
        12+5=<<12+5=17>>17.\\n#### 17"}

    Only the reward sees the solution. It has no ids.
    """

    question: NonEmptyText
    answer: NonEmptyText

    def record(self) -> Record:
        solution, _, value = self.answer.rpartition("####")
        if not solution or not (value := value.strip().replace(",", "")):
            raise ValueError("no #### before the answer")
        steps = solution.count("<<")
        return Record("", self.question, [value], f"{steps}-step", steps, [], [])


class _Index(BaseModel):
    index: NonEmptyText


PROMPT_WRAPPER = re.compile(
    r"Solve the following math problem.*?is the answer to the problem\.(.*)"
    r"Remember to put your answer on .*",
    re.DOTALL,
)
"""A problem among the words that the first release of DAPO-Math puts around it."""


class DapoProblem(BaseModel):
    """Parse DAPO-Math-17k (Yu et al. 2025): competition problems with whole numbers as answers.

        {"prompt": "...", "solution": "34", "data_source": "math_dapo", "ability": "MATH",
        "extra_info": {"index": "9a9b6eb4-..."},
         "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "source_prompt":
         [...]}

    This is the second release, by open-r1. The first, by ByteDance, has each problem a hundred
    times, as the content of a message, and words about the answer's form around it:

        {"prompt": [{"role": "user", "content": "Solve the following math problem step by step.
        ..."}],
         "reward_model": {"ground_truth": "34", ...}, "extra_info": {"index": "9a9b6eb4-..."}, ...}
    """

    prompt: NonEmptyText
    solution: NonEmptyText
    extra_info: _Index

    @model_validator(mode="before")
    @classmethod
    def _first_release(cls, value: Any) -> Any:
        match value:
            case {"prompt": [{"content": str(text)}], "reward_model": {"ground_truth": answer}}:
                bare = PROMPT_WRAPPER.fullmatch(text.strip())
                return value | {"prompt": bare[1] if bare else text, "solution": answer}
        return value

    def record(self) -> Record:
        return Record(self.extra_info.index, self.prompt, [self.solution], "math", 0, [], [])


GSM8K = Dataset(
    name="gsm8k",
    hub="openai/gsm8k",
    config="main",
    revision="e53f048856ff4f594e959d75785d2c2d37b678ee",
    files={"train": "train.jsonl", "test": "test.jsonl"},
    counts={"train": 7473, "test": 1319},
    form=Gsm8kProblem,
    ability="math",
)
DAPO_MATH = Dataset(
    name="dapo-math",
    hub="open-r1/DAPO-Math-17k-Processed",
    config="en",
    revision=None,
    files={"train": "train-00000-of-00001.parquet"},
    counts={"train": 14116},
    form=DapoProblem,
    ability="math",
)
