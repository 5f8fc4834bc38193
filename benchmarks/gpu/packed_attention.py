"""Compare packed attention with grouped heads, and a compiled entropy, with plain arithmetic.

    python -m benchmarks.gpu.packed_attention OUT.json

In: one GPU. Out: relative differences of output and gradients, and of the entropy. verl's trainer
packs rows with PyTorch's kernel. From PyTorch 2.13 it passes 12 query and 2 key heads as they are;
older versions repeat the key heads first (cluster/no_flash_attn.py). Both end in the operator
`aten::_flash_attention_forward`, which is called here directly, so an older torch can speak for
the kernel. It cannot speak for the code of 2.13 around it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HEADS, KEY_HEADS, WIDTH = 12, 2, 128
"""Of Qwen2.5-1.5B."""
ROWS = (700, 1301, 64, 2047)
"""Tokens of the packed rows; odd ones, too."""


def flash_packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """Attend within rows, from q [T, H, D] to k and v [T, K, D]."""
    longest = int(ends.diff().max())
    # As torch 2.13's varlen_attn calls it: dropout 0, causal, no debug mask, any number of tokens
    # back and none ahead.
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, ends, ends, longest, longest, 0.0, True, False,
        window_size_left=-1, window_size_right=0,
    )  # fmt: skip
    return out[0]


def row_by_row(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """Compute the same in q's precision, one row after the other."""
    parts = []
    places = ends.tolist()
    for start, end in zip(places, places[1:], strict=False):
        rows = (x[None, start:end].transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def relative(value: Tensor, reference: Tensor) -> float:
    """Return ||value - reference|| / ||reference||."""
    difference = value.float() - reference.float()
    return (difference.norm() / reference.float().norm()).item()


def compare_attention(device: str, attend: Any) -> dict[str, float]:
    """Compare output and gradients in bfloat16 with those in float32."""
    generator = torch.Generator(device).manual_seed(0)
    ends = torch.tensor((0, *ROWS), device=device).cumsum(0).int()
    tokens = int(ends[-1])
    shapes = ((tokens, HEADS, WIDTH), (tokens, KEY_HEADS, WIDTH), (tokens, KEY_HEADS, WIDTH))
    inputs = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator, device=device)
    results = []
    for function, dtype in ((attend, torch.bfloat16), (row_by_row, torch.float32)):
        leaves = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves, ends)
        (out.float() * weight).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    return {
        name: relative(ours, reference)
        for name, ours, reference in zip(names, *results, strict=True)
    }


def compare_entropy(device: str) -> dict[str, float]:
    """Compare the entropy that verl compiles with the same function uncompiled."""
    from verl.utils.torch_functional import entropy_from_logits

    logits = torch.randn(512, 151_936, device=device)
    eager = entropy_from_logits(logits)
    compiled = torch.compile(entropy_from_logits, dynamic=True)(logits)
    return {"compiled entropy": relative(compiled, eager)}


def describe_card() -> str:
    """Return what nvidia-smi says of the card; empty without one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def main(out: Path) -> None:
    """Write each result as soon as it is known."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attend = flash_packed if device == "cuda" else row_by_row  # the kernel is for GPUs only
    figures: dict[str, Any] = {"card": describe_card(), "torch": torch.__version__}
    comparisons = [lambda: compare_attention(device, attend)]
    if device == "cuda":  # a CPU's compiler takes minutes, and says nothing of a GPU's
        comparisons.append(lambda: compare_entropy(device))
    for compare in comparisons:
        try:
            figures |= compare()
        except Exception as error:  # a missing package must not hide the other result
            figures |= {"error": f"{type(error).__name__}: {error}"}
        out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
