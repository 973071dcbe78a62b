"""Calling kernels: what was launched once is launched again without Triton's binding of arguments, which takes the host longer than the rest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Held = dict[Hashable, "_Bound"]
"""Compiled kernels by whatever they were compiled for."""

_HERE: AbstractContextManager[object] = nullcontext()


class _Bound:
    """A compiled kernel and its arguments in order, of which those named in ``places`` change from call to call."""

    __slots__ = ("arguments", "launch", "places")

    def __init__(self, launch: Callable[..., None], arguments: list[Any], places: list[int]) -> None:
        self.launch, self.arguments, self.places = launch, arguments, places


def call(held: Held, key: Hashable, kernel: Any, grid: tuple[int, ...], changing: Mapping[str, Any], fixed: Callable[[], dict[str, Any]]) -> None:
    """Launch ``kernel``; with a ``key`` seen before, the kernel that was compiled then.

    Args:
        held: where compiled kernels are kept.
        key: equal only for launches that Triton would run the same compiled kernel for, with the same ``fixed`` arguments and grid.
        kernel, grid: as Triton takes them.
        changing: tensors, tensor descriptors and ``None``, by name; which are ``None`` is part of the key.
        fixed: all other arguments and Triton's options.
    """
    bound = held.get(key)
    if bound is None:
        rest = fixed()
        compiled = kernel[grid](**changing, **rest)
        if compiled is not None:  # the interpreter compiles nothing
            names, everything = kernel.arg_names, {**rest, **changing}
            arguments = [None if name in changing else everything[name] for name in names]
            places = [names.index(name) for name, value in changing.items() if value is not None]
            held[key] = _Bound(compiled[(*grid, 1, 1)[:3]], arguments, places)
        return
    arguments = bound.arguments.copy()
    values = (value for value in changing.values() if value is not None)
    for place, value in zip(bound.places, values, strict=True):
        arguments[place] = value.data_ptr() if isinstance(value, Tensor) else value
    bound.launch(*arguments)


def described_by(tensor: Tensor) -> tuple[Any, ...]:
    """What Triton compiles for in a tensor's place: its strides, and whether it lies on 16 bytes."""
    return (tensor.stride(), tensor.data_ptr() % 16 == 0)


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever the tensors'."""
    if device.type == "cpu" or (device.type == "cuda" and device.index == torch.cuda.current_device()):
        return _HERE
    return torch.get_device_module(device).device(device)  # type: ignore[no-any-return]
