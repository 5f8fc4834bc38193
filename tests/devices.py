"""A GPU's rule about where tensors are, on a machine without one.

Under `CreatedWithDevice`, a tensor that was made without `device=`, and all that is computed of
such tensors alone, is host memory. Everything else (weights, what was made with `device=` or
brought by `.to(device)`) counts as on the GPU. An operation that takes both fails here as it would
there. Bookkeeping that stays in host memory (the order of rows, how long they are) is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FACTORIES = {
    getattr(torch, name)
    for name in (
        "tensor",
        "as_tensor",
        "from_numpy",
        "empty",
        "zeros",
        "ones",
        "full",
        "eye",
        "arange",
        "linspace",
        "rand",
        "randn",
        "randint",
        "randperm",
        "normal",
    )
}
DEVICE = Tensor.device.__get__
HOST, GPU = torch.device("cpu"), torch.device("cpu", 0)
"""What `tensor.device` is in here. Where a run's own device is named, that is the GPU: the text
"cpu"."""
BRINGS = {Tensor.to, Tensor.copy_, Tensor.cuda, torch.nn.Module.load_state_dict}


class CreatedWithDevice(TorchFunctionMode):
    """See the module's docstring. Raises AssertionError with the operation that would fail."""

    operations = 0
    """Operations on tensors so far."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [*tensors((args, kwargs))]
        self.operations += bool(given)
        mixed = {
            on_host(tensor) for tensor in given if tensor.dim()
        }  # a number goes with tensors of any device
        if func not in BRINGS and len(mixed) == 2:
            shapes = ", ".join(f"{'host' if on_host(t) else 'GPU'} {list(t.shape)}" for t in given)
            raise AssertionError(
                f"{getattr(func, '__name__', func)} takes tensors of host and GPU: {shapes}"
            )
        if func in (Tensor.numpy, Tensor.__array__) and not on_host(args[0]):
            raise AssertionError(f"{func.__name__} of a tensor on the GPU")
        if func == DEVICE:
            return HOST if on_host(args[0]) else GPU
        out = func(*args, **kwargs)
        to = [place for place in (*args, *kwargs.values()) if isinstance(place, str | torch.device)]
        if func in FACTORIES:
            host = kwargs.get("device") in (None, HOST)
        elif func is Tensor.to and to:
            host = to[0] == HOST
        else:
            host = func is Tensor.cpu or bool(given) and all(map(on_host, given))
        if func in (Tensor.to, Tensor.cpu) and out is args[0]:  # here nothing had to move
            out = out.view_as(out)
        for tensor in tensors(out):
            tensor.on_host = host
        return out


def on_host(tensor: Tensor) -> bool:
    return getattr(tensor, "on_host", False)


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors(inner)
