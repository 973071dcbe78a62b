"""One launch of a step: rows of one kind on one lane, and what a layer adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnmux.backends._flashinfer_lane import Lane
from attnmux.dispatch.backend import LayerArgs
from attnmux.dispatch.errors import complaint
from attnmux.dispatch.spec import AttentionSpec

LN2 = math.log(2)
ALIGNED = 16
"""Bytes that a kernel reads at once."""
OFFSETS = 2**31
"""Elements that FlashInfer's 32-bit token offsets reach."""


@dataclass(eq=False)
class Launch:
    """Rows of one kind.

    Args:
        lane: planned for them.
        tokens: how many query tokens they have.
        slice: where these stand in the step's, or ``None``.
        scratch: bytes that its partial outputs take.
        index: int64 ``[tokens]``, where they must be gathered from otherwise.
        extra: device tensors of the module that belong to the step: ranges, or families and where they begin.
        lse_factor: float32 ``[tokens a graph has room for, 1]``: ln 2 for this step's tokens, 1 for padding.
        twin: makes the same launch for fa2, for pools that fa3 cannot read.
    """

    lane: Lane
    tokens: int
    slice: tuple[int, int] | None
    scratch: int
    index: Tensor | None = None
    extra: tuple[Tensor, ...] = ()
    lse_factor: Tensor | None = None
    twin: Callable[[], Launch] | None = None
    _twin: list[Launch] = field(default_factory=list)

    def lanes(self) -> list[Lane]:
        return [self.lane, *(launch.lane for launch in self._twin)]

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.index, self.lse_factor, *self.extra) if t is not None]

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor], out: Tensor, lse: Tensor | None, arguments: Sequence[Any], fused: bool) -> None:
        """The rows' part of one layer. ``q``, ``out`` and ``lse`` hold the whole step."""
        if self.lane.module.kernel == "fa3" and caches[0].stride() != caches[1].stride():
            assert self.twin is not None
            self._twin = self._twin or [self.twin()]
            self._twin[0].run(q, caches, out, lse, arguments, fused)
        elif self.index is not None:
            part, sums = torch.empty((self.tokens, *out.shape[1:]), dtype=out.dtype, device=out.device), None
            if lse is not None:
                sums = torch.empty((self.tokens, lse.shape[1]), dtype=lse.dtype, device=lse.device)
            self._launch(q.index_select(0, self.index), caches, part, sums, arguments, fused)
            out.index_copy_(0, self.index, part)
            if lse is not None and sums is not None:
                lse.index_copy_(0, self.index, sums)
        elif self.tokens:
            first, last = self.slice or (0, self.tokens)
            self._launch(q[first:last], caches, out[first:last], None if lse is None else lse[first:], arguments, fused)

    def _launch(self, q: Tensor, caches: tuple[Tensor, Tensor], out: Tensor, lse: Tensor | None, arguments: Sequence[Any], fused: bool) -> None:
        """fa2 writes outputs side by side whatever their strides say, and loads 16 bytes at a time."""
        q = q if aligned(q) else q.clone(memory_format=torch.contiguous_format)
        check_offsets(q, out)
        direct = out.is_contiguous() and aligned(out)
        if not direct and self.lane.graph is not None and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                complaint("out", f"strided by {out.stride()}", "contiguous", "a graph cannot hold the copy: later steps may have more tokens")
            )
        target = out if direct else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        sums = None if lse is None else lse[: self.tokens]
        self.lane.run(q, caches, (*self.extra, *arguments), target, sums, fused)
        if not direct:
            out.copy_(target)
        if lse is None or sums is None:
            return
        if self.lse_factor is None:
            sums.mul_(LN2)
        else:  # the graph holds this product for as many tokens as a later step may have
            room = min(len(lse), len(self.lse_factor))
            lse[:room].mul_(self.lse_factor[:room])


def aligned(tensor: Tensor) -> bool:
    """Whether every row of the last dimension begins on 16 bytes."""
    size = tensor.element_size()
    strides = (stride * size for stride, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1)
    return tensor.data_ptr() % ALIGNED == 0 and all(stride % ALIGNED == 0 for stride in strides)


def check_offsets(q: Tensor, out: Tensor) -> None:
    """Token offsets are 32-bit in FlashInfer.

    Raises:
        ValueError: the tensors are larger than that.
    """
    for name, tensor in (("q", q), ("out", out)):
        if tensor.shape[0] * tensor.stride(0) >= OFFSETS:
            todo = "split the batch, or deny flashinfer"
            raise ValueError(complaint(name, f"{tensor.shape[0]} tokens {tensor.stride(0)} elements apart", f"less than {OFFSETS} elements", todo))


def check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    """Pools as the kernels can read them; they are never copied.

    Raises:
        ValueError: a key does not begin on 16 bytes, or pages lie further apart than 32 bits count.
    """
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not aligned(cache):
            raise ValueError(
                complaint(name, f"at {cache.data_ptr() % ALIGNED} bytes past 16, strided by {cache.stride()}", "keys that begin on 16 bytes")
            )
        if cache.stride(0) >= 2**32:
            raise ValueError(complaint(f"{name}'s pages", f"{cache.stride(0)} elements apart", f"less than {2**32}"))


def layer_arguments(spec: AttentionSpec, lane: Lane, layer: LayerArgs, scale: Callable[[Tensor | float | None], Tensor]) -> list[Any]:
    """What a module takes of a layer, behind what belongs to the step. ``scale`` makes a device tensor of a scale."""
    if lane.module.kind == "stock":
        return []
    window = spec.sliding_window
    if lane.module.kind == "ranges":
        return [-1 if window is None else window - 1, window if window is not None and spec.mm_prefix == "within_window" else 0]
    variant = lane.module.variant
    given: list[Any] = []
    if variant.alibi and layer.alibi_slopes is not None:
        given.append(layer.alibi_slopes.contiguous())
    if variant.sinks and layer.sinks is not None:
        given.append(layer.sinks.to(torch.float32).contiguous())
    if variant.scales:
        given += [scale(layer.k_scale), scale(layer.v_scale)]
    given.append(spec.scale)
    if variant.softcap:
        given.append(spec.softcap)
    if variant.families:
        given.append(-1.0 if window is None else float(window - 1))
    return given
