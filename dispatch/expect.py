"""Checks of single tensors, shared by those of batches and calls."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmux.dispatch.errors import complaint
from attnmux.dispatch.spec import DTYPE_NAMES


def expect_tensor(name: str, value: object, shape: tuple[int | str, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> Tensor:
    """``value`` if it is a tensor of that rank, shape (strings are free dimensions), dtype and device."""
    if not isinstance(value, Tensor):
        raise TypeError(complaint(name, type(value).__name__, f"a tensor [{_shape(shape)}]"))
    fits = value.shape == shape  # mostly, and sooner told than by what follows
    if not fits and not (
        value.dim() == len(shape) and all(isinstance(want, str) or got == want for got, want in zip(value.shape, shape, strict=True))
    ):
        raise ValueError(complaint(name, f"[{_shape(tuple(value.shape))}]", f"[{_shape(shape)}]"))
    if value.dtype not in dtypes:
        wanted = " or ".join(DTYPE_NAMES.get(d, str(d).removeprefix("torch.")) for d in dtypes)
        raise TypeError(complaint(f"{name}'s dtype", DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch.")), wanted))
    if value.device != device:
        raise ValueError(complaint(f"{name}'s device", value.device, str(device)))
    if torch.is_grad_enabled() and value.requires_grad:
        raise ValueError(f"{name} requires a gradient, and attnmux computes none: call under torch.no_grad() or torch.inference_mode()")
    return value


def _shape(shape: tuple[int | str, ...]) -> str:
    return ", ".join(map(str, shape))


def expect_optional(
    name: str, value: object, wanted: bool, otherwise: str, shape: tuple[int | str, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if wanted:
        if value is None:
            raise ValueError(complaint(name, "missing", f"a tensor [{_shape(shape)}]"))
        expect_tensor(name, value, shape, dtypes, device)
    elif value is not None:
        raise ValueError(f"{name} is given, but {otherwise}: leave it out")
