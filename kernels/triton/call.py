"""Calling kernels: what was launched once is launched again without Triton's binding of arguments, which takes the host longer than the rest."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton import knobs

Held = dict[Hashable, Sequence["Bound"]]
"""Compiled kernels by the form of the call that they were compiled for."""

_HERE: AbstractContextManager[object] = nullcontext()


class Bound:
    """A compiled kernel and its arguments in order. Calling it launches it.

    Args:
        compiled: the kernel.
        grid: of the first launch, in three dimensions.
        arguments: as they were in the first launch.
        places: which of them change from call to call, and where in the call's values the new ones are.
    """

    __slots__ = ("arguments", "compiled", "function", "grid", "metadata", "places", "run")

    def __init__(self, compiled: Any, grid: tuple[int, int, int], arguments: list[Any], places: list[tuple[int, int]]) -> None:
        self.compiled, self.grid, self.arguments, self.places = compiled, grid, arguments, places
        self.run, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata

    def __call__(self, values: Sequence[Any], stream: int | None, grid: tuple[int, int, int] | None = None) -> None:
        """Launch on a stream, as a number (``None``: the current one), with addresses and tensor descriptors from ``values``."""
        arguments = self.arguments.copy()
        for place, source in self.places:
            arguments[place] = values[source]
        x, y, z = grid or self.grid
        if stream is None or _watched():
            self.compiled[x, y, z](*arguments, stream=stream)
        else:  # what that comes to, at half the host time
            self.run(x, y, z, stream, self.function, self.metadata, None, None, None, *arguments)


def _watched() -> bool:
    """Whether somebody, a profiler perhaps, has asked Triton to be told of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook  # None, or from Triton 3.5 on a chain of them
    return bool((enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True)))


def bind(kernel: Any, grid: tuple[int, int, int], arguments: Mapping[str, Any], changing: Sequence[str]) -> list[Bound]:
    """Launch ``kernel`` through Triton, and keep what it compiled; nothing in the interpreter, which compiles nothing.

    Args:
        kernel, grid: as Triton takes them.
        arguments: all of them by name, and Triton's options. Tensors that do not change must live as long as what is returned.
        changing: of each of the values that later launches are given, the name of its argument; those that are ``None`` stay so.
    """
    compiled = kernel[grid](**arguments)
    if compiled is None:
        return []
    order = {name: place for place, name in enumerate(kernel.arg_names)}
    places = [(order[name], source) for source, name in enumerate(changing) if name in order and arguments[name] is not None]
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in (arguments[name] for name in order)]
    return [Bound(compiled, grid, values, places)]


def addresses(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Where tensors begin, ``None`` for those that are not given."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def alignment(*places: int) -> Hashable:
    """What Triton compiles apart of addresses: which of them lie on 16 bytes."""
    together = 0
    for place in places:
        together |= place
    return not together % 16 or tuple(place % 16 == 0 for place in places)


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever the tensors'."""
    if device.type == "cpu" or (device.type == "cuda" and device.index == torch.cuda.current_device()):
        return _HERE
    return torch.get_device_module(device).device(device)  # type: ignore[no-any-return]
