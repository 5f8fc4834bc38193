"""Name every known cause of a run that does not learn, with meaning and remedy.

In: nothing. Out: `CAUSES`, one table for all who name a cause. Next: `sentinel.py` tests the causes
that metrics show, during the run. `agent-r1 diagnose` (recipes/diagnose) also tests those that only
recorded episodes show. A new cause is a row here and a test in one of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A cause, as the dashboard, the report and `agent-r1 diagnose` name it."""

    name: str
    meaning: str
    remedy: str
    """What to try first."""
    sign: str = ""
    """The sentinel's short name of it; empty if metrics alone do not show it."""


_FORMAT = "Start from an instruct model, or train a cold start that shows the format"

_ROWS = (
    # ------------------------------------------------- why is my reward zero? (metrics show it)
    Cause(
        "turns are cut off",
        "nothing in a cut-off turn is executed or rewarded",
        "Raise rollout.max_tokens_per_turn, or teach the format in a longer cold start",
        sign="zero: max_tokens",
    ),
    Cause(
        "conversations do not fit",
        "prompts and results do not fit",
        "Raise rollout.max_context, or lower search.top_k and env.tool_max_chars",
        sign="zero: context_overflow",
    ),
    Cause(
        "answers cannot be read",
        "the model does not write the tags that the environment reads",
        _FORMAT,
        sign="zero: no_answer",
    ),
    Cause(
        "calls cannot be parsed",
        "the model does not write calls as the environment reads them",
        _FORMAT,
        sign="zero: invalid_calls",
    ),
    Cause(
        "turns run out",
        "the agent calls tools until its turns end, and never answers",
        "Raise env.max_turns, or show answers in the cold start",
        sign="zero: max_turns",
    ),
    Cause(
        "tools were never called",
        "the agent answers from memory, or its calls are not recognised",
        "Look at a turn in rollouts/; check env.tools",
        sign="zero: no call",
    ),
    Cause(
        "calls cannot be run",
        "the model writes the tags, but wrong names or arguments",
        "Look at a call in rollouts/; check names and arguments",
        sign="zero: invalid calls",
    ),
    Cause(
        "all answers are wrong",
        "the answers are well formed, and all are wrong",
        "Make the questions easier, or reward partial success (env.evidence_reward)",
        sign="zero: wrong",
    ),
    # ---------------------------------------------------- has it collapsed? (metrics show it)
    Cause(
        "groups agree",
        "nothing was learnt",
        "Look at rollouts/; other questions, a higher rollout.temperature or more "
        "samples_per_prompt may help",
        sign="groups agree",
    ),
    Cause(
        "the penalty costs more than answers earn",
        "an early answer pays more than a search, so the agent unlearns to search",
        "Lower env.format_penalty, or set it to 0",
        sign="penalty",
    ),
    Cause(
        "the reward falls",
        "updates were too large, or the policy exploits a part of the reward",
        "Lower actor.lr, or keep the policy near the start model with actor.kl_coef",
        sign="reward falls",
    ),
    Cause(
        "the policy tries nothing new",
        "the policy tries nothing new, so it cannot improve",
        "Lower actor.lr, or set actor.entropy_coef=0.001",
        sign="entropy",
    ),
    Cause(
        "calls grow without more reward",
        "they grow without more reward",
        "Set env.call_reward to 0, and look at the results of the calls",
        sign="calls per episode",
    ),
    Cause(
        "episodes grow without more reward",
        "they grow without more reward",
        "Lower rollout.max_tokens_per_turn; try seq-mean-token-mean",
        sign="tokens per episode",
    ),
    Cause(
        "the sampler is not the trainer's policy",
        "the sampler lacks the trainer's weights or rounds very differently, and the ratios "
        "measure that",
        "Compare temperature, top-p, weights and trainer.dtype of both, and whether text is "
        "encoded again",
        sign="sampler",
    ),
    Cause(
        "host memory leaks",
        "a process leaks memory",
        "Find the growing process; trainer.max_hours and --resume restart all processes",
        sign="host memory",
    ),
    Cause(
        "sampling became slow",
        "the sampler or the machine became slower, or other programs use its cores",
        "Look for other programs; --resume starts all processes of the run anew",
        sign="slow sampling",
    ),
    # ------------------------------------------------------------- only recorded episodes show it
    Cause(
        "the action mask covers tool results",
        "the policy is trained to write what its tools wrote",
        "Build the mask from what was sampled, not from what follows the prompt",
    ),
    Cause(
        "documents can forge turns",
        "a tool's text contains control tokens, so it can speak as the user or the agent",
        "Encode tool results as data, without control tokens",
    ),
    Cause(
        "groups mix questions",
        "an easy question is compared with a difficult one",
        "Give the samples of one question one group id, and keep ids through shuffling",
    ),
    Cause(
        "the samples of a group begin in different states",
        "an easy state is compared with a difficult one, although the question is the same",
        "Draw everything random in `reset` from its `seed`, which all samples of a question share",
    ),
    Cause(
        "the cold start was memorised",
        "the model gives each question one answer, so its samples do not differ",
        "Clone for fewer steps (cold_start.copy_steps, cold_start.mix_steps), give more "
        "demonstrations, or raise rollout.temperature",
    ),
    Cause(
        "calls fail",
        "the agent learns that calls are useless, because nearly none works",
        "Call the tool by hand (`agent-r1 tools --call`), and read a result in rollouts/",
    ),
    Cause(
        "every advantage is zero",
        "rewards differ, and no update follows from them",
        "Check the estimator's name, and that it is registered",
    ),
    Cause(
        "rewards are lost on masked tokens",
        "a reward on a token that was not sampled trains nothing",
        "Put the outcome on the last action token, also when a tool result follows it",
    ),
    Cause(
        "the agent writes its own reward",
        "the reward is a file that a call can write",
        "Keep rewards and tests out of the agent's reach, and delete such files before grading",
    ),
    Cause(
        "the reward can be talked into it",
        "one text is paid whatever the question is",
        "Read these episodes; compare the judge with exact match, and show it the answer between "
        "marks",
    ),
    Cause(
        "turns do not end",
        "the model was not trained to write the stop token",
        "Train the stop token: the mask of the cold start covers it, and padding is not the stop "
        "token",
    ),
    Cause(
        "the tool knows the answer",
        "the agent learns to ask the tool, and not to solve the task",
        "Let no tool read the right answer; evaluate without the tool",
    ),
    Cause(
        "a longer answer that contains the right one is paid",
        "the agent learns to list every answer that it can think of",
        "Pay exact match, or a judge that is shown what was wanted",
    ),
    Cause(
        "the penalised KL grows",
        "the penalty pushes the policy away from the start model",
        "Check the sign of the KL term; then its coefficient",
    ),
    Cause(
        "unfinished episodes are dropped",
        "the agent never learns that a limit ends its episodes",
        "Train on unfinished episodes with their penalty, unless a limit is not the agent's fault",
    ),
    Cause(
        "updates are too large",
        "one step moved the policy far, and the reward did not recover",
        "Halve the learning rate; count the optimiser steps of a batch",
    ),
    Cause(
        "calls stopped paying",
        "the agent found a reward that needs no call",
        "Read paid episodes without a call, and find what pays",
    ),
)

CAUSES = {cause.name: cause for cause in _ROWS}
"""Name -> cause."""
BY_SIGN = {cause.sign: cause for cause in _ROWS if cause.sign}
"""The sentinel's short name -> cause."""
