"""Merging attention states over disjoint keys."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmux.dispatch.errors import complaint


def merge_states(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention over the union of several sets of keys, from its results over each set.

    Args:
        outs: ``[states, tokens, Hq, Dv]``, computed without sinks; or a sequence of ``[tokens, Hq, Dv]``.
        lses: float32 ``[states, tokens, Hq]``, natural log; ``-inf`` marks an empty state; or a sequence.
        sinks: float ``[Hq]``; added to the denominator once, here.

    Returns:
        ``(out [tokens, Hq, Dv], lse [tokens, Hq] float32)``. Merging empty states stays empty: 0 and ``-inf``
        (or the sink). What an empty state holds in ``outs`` is ignored, NaN included.

    Raises:
        TypeError: ``lses`` is not float32, or an argument is no tensor.
        ValueError: shapes do not fit.

    Source: the online softmax of Milakov and Gimelshein (2018), as FlashAttention and FlashDecoding split it.
    """
    outs, lses = _stack("outs", outs), _stack("lses", lses)
    if lses.dtype != torch.float32:
        raise TypeError(complaint("lses", lses.dtype, "torch.float32"))
    if outs.dim() != 4 or lses.shape != outs.shape[:3]:
        raise ValueError(complaint("lses", tuple(lses.shape), f"outs' leading three dimensions, of {tuple(outs.shape)}"))
    if outs.shape[0] == 0 or not outs.is_floating_point():
        raise ValueError(complaint("outs", f"{outs.shape[0]} states of {outs.dtype}", "at least one, of a float dtype"))
    if sinks is not None and not isinstance(sinks, Tensor):
        raise TypeError(complaint("sinks", type(sinks).__name__, "a tensor [Hq]"))
    if sinks is not None and sinks.shape != outs.shape[2:3]:
        raise ValueError(complaint("sinks", tuple(sinks.shape), f"[Hq] = {tuple(outs.shape[2:3])}"))
    top = lses.amax(0) if sinks is None else torch.maximum(lses.amax(0), sinks.float())
    top = torch.where(top == -torch.inf, 0.0, top)  # [tokens, Hq]; an empty state weighs exp(-inf - 0) = 0
    weights = torch.exp(lses - top)  # [states, tokens, Hq]
    total = weights.sum(0)
    if sinks is not None:
        total = total + torch.exp(sinks.float() - top)
    values = torch.where((lses == -torch.inf)[..., None], 0.0, outs.float())
    merged = (values * weights[..., None]).sum(0) / torch.where(total == 0, 1.0, total)[..., None]
    return merged.to(outs.dtype), top + torch.log(total)


def _stack(name: str, value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(v, Tensor) for v in value):
        if len({v.shape for v in value}) > 1:
            raise ValueError(complaint(name, ", ".join(str(tuple(v.shape)) for v in value), "tensors of one shape"))
        return torch.stack(list(value))
    raise TypeError(complaint(name, type(value).__name__, "a tensor or a non-empty sequence of tensors"))
