"""Find the tokens that end a turn of a model.

In: the control tokens of a model, and the ends that its template writes. Out: `TurnEnds`. Next:
`format.py` closes turns with them, and every policy stops at them. Most models have one end, such
as Qwen's `<|im_end|>`; GLM, Harmony and Llama 3 have several.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MESSAGE_ENDS = {"<|end|>": ("<|call|>", "<|return|>")}
"""Control token that ends a message, if a turn may have several -> the tokens that end the turn.

The vocabulary decides, not `env.name`: a model with these tokens was trained to end its turns with
them (Harmony).
"""
OTHER_ENDS = ("<|eom_id|>",)
"""Control tokens that also end a turn, where the template writes another (Llama 3 after a call)."""


@dataclass(frozen=True)
class TurnEnds:
    """Ids of the control tokens that end a turn of one model."""

    stop: tuple[int, ...]
    """Sampling one of these ends the turn, for every policy."""
    closing: frozenset[int]
    """The template's end is not added to a turn that ends with one of these."""
    others: frozenset[int]
    """Those of `closing` that the template does not write itself."""

    def is_closed(self, action_ids: list[int], end: int) -> bool:
        """Return whether a sampled turn is closed, where the template closes it with `end`.

        GLM closes a turn with the next role's token: `<|observation|>` before a result, `<|user|>`
        before a question. If the other one was sampled, the turn is still open for this template.
        """
        return bool(action_ids) and (action_ids[-1] == end or action_ids[-1] in self.others)


def find_turn_ends(
    control_ids: dict[str, int], template_ends: set[int], model_ends: Iterable[int | None]
) -> TurnEnds:
    """Combine the template's ends, the model's (eos and generation_config.json), and the tables."""
    others = {control_ids[token] for token in OTHER_ENDS if token in control_ids}
    # A token that closes one of several messages is no stop: the turn would end after its thought.
    only_close: set[int] = set()
    for message_end, turn_ends in MESSAGE_ENDS.items():
        own_ends = {control_ids[token] for token in turn_ends if token in control_ids}
        others |= own_ends
        if own_ends and message_end in control_ids:
            only_close.add(control_ids[message_end])
    closing = template_ends | others
    stop = {token for token in model_ends if token is not None} | closing
    return TurnEnds(tuple(sorted(stop - only_close)), frozenset(closing), frozenset(others))
