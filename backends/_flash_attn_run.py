"""What both FlashAttention adapters do around their kernels: pools as the kernels take them, alignment, streams, sinks, log-sum-exps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnmux.backends._flash_attn_step import PACKED_PAGE, Step
from attnmux.dispatch.errors import complaint
from attnmux.dispatch.spec import AttentionSpec

ALIGNMENT = 16
"""Bytes that both kernels load and store at once."""


def is_aligned(tensor: Tensor) -> bool:
    """Whether the kernels can take it as it is: 16-byte address and strides, last dimension contiguous."""
    if tensor.data_ptr() % ALIGNMENT or tensor.stride(-1) != 1:
        return False
    return all(stride * tensor.element_size() % ALIGNMENT == 0 for stride in tensor.stride()[:-1])


def paged(name: str, cache: Tensor, spec: AttentionSpec) -> Tensor:
    """A pool as ``[pages, page, Hkv, D]``, a view.

    Packed keys become pages of 16 that overlap, one from each key on: the kernels read no row beyond a row's length, hence a page may
    reach into the next row or beyond the pool's end. The varlen form of both libraries loads whole key tiles with TMA instead, and
    multiplies what lies behind a row's last value by 0: NaN, if that memory holds one.

    Raises:
        ValueError: it is not aligned; keys and values are never copied.
    """
    if not is_aligned(cache):
        found = f"at {cache.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT}, strides {tuple(cache.stride())}"
        raise ValueError(complaint(name, found, f"an address and strides that are multiples of {ALIGNMENT} bytes"))
    if spec.page_size is not None:
        pool = cache.transpose(1, 2) if spec.kv_layout == "HND" else cache
        return pool if pool.shape[0] else pool.new_empty((1, *pool.shape[1:]))  # no row has a key; libraries treat an empty pool as a case of its own
    keys, heads, size = cache.shape
    if keys == 0:
        return cache.new_empty((1, 1, heads, size))
    page = PACKED_PAGE if keys >= PACKED_PAGE else 1
    return cache.as_strided((keys - page + 1, page, heads, size), (cache.stride(0), *cache.stride()))


def current_stream(device: torch.device) -> tuple[int, Any]:
    """The stream that launches go to, as a number and as an object; 0 and ``None`` on a CPU."""
    if device.type != "cuda":
        return 0, None
    stream = torch.cuda.current_stream(device)
    return int(stream.cuda_stream), stream


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def wait_for_readers(step: Step, raw: int, stream: Any) -> None:
    """Before a step's tensors are written anew: what reads them elsewhere must have ended."""
    if stream is None or capturing(stream.device):
        return
    if step.raw_stream != raw and step.stream is not None:
        stream.wait_stream(step.stream)
    for event in step.used.values():
        stream.wait_event(event)


def wait_for_tensors(step: Step, stream: Any) -> None:
    """Before a run on another stream than the plan's: the tensors must be there, and stay."""
    if stream is None or capturing(stream.device):
        return
    if step.ready is not None:
        stream.wait_event(step.ready)
    for tensor in step.tensors():
        tensor.record_stream(stream)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor, live: Tensor | None) -> Tensor:
    """Add each head's sink to the denominator of an answer without sinks, in place: ``out * sigmoid(lse - sink)``.

    Args:
        out: ``[tokens, Hq, Dv]``.
        lse: float32 ``[Hq, tokens]``, natural, without sinks; ``-inf`` where a token sees nothing.
        sinks: ``[Hq]``, any float dtype.
        live: bool ``[tokens]``, which tokens are no padding; ``None``: all.

    Returns:
        The log-sum-exp with sinks.
    """
    logits = sinks.to(lse.dtype)[:, None]
    share = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - logits))
    if live is not None:
        share = torch.where(live, share, 1.0)
    out.mul_(share.t()[..., None])
    return torch.logaddexp(lse, logits)


def store_lse(lse: Tensor, found: Tensor, live: Tensor | None) -> None:
    """Copy ``[Hq, tokens]`` to ``[tokens, Hq]``, padding tokens left alone."""
    lse.copy_(found.t() if live is None else torch.where(live[:, None], found.t(), lse))
