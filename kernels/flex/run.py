"""One layer of a step: every part through FlexAttention, merged by log-sum-exp, sinks last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import Lock
from types import FunctionType
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor

from attnmux.kernels.flex.look import Look, Tables, attend
from attnmux.kernels.flex.step import Part, Step
from attnmux.kernels.reference import full_precision

Attend = Callable[[Tensor, Tensor, Tensor, Tables, Tensor | None, dict[str, Any] | None], tuple[Tensor, Tensor]]
_LOCK = Lock()


@cache
def compiled(look: Look, spread: int, form: tuple[object, ...], compiler: Any = "inductor") -> Attend:
    """The call for one kind of layer and tile: with arguments of :func:`_of_any_length` one graph serves all steps.

    ``form`` is whatever else a graph depends on. Each has code of its own, since torch counts a function's graphs by its code
    and refuses the ninth. Not dynamic by itself: a window or page size that differs from the last graph's would become a variable.
    """

    def call(q: Tensor, k: Tensor, v: Tensor, tables: Tables, slopes: Tensor | None, options: dict[str, Any] | None) -> tuple[Tensor, Tensor]:
        return attend(look, spread, q, k, v, tables, slopes, options)

    own = FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
    return torch.compile(own, backend=compiler, fullgraph=True, dynamic=False)


def _of_any_length(q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> None:
    """Says which dimensions change from step to step. Each by itself: ``dynamic=True`` takes equal sizes for the same
    size, and two tiles for the two heads of a pool, which are fixed.
    """
    dynamic: list[tuple[Tensor, Iterable[int]]] = [
        (q, (0,)),
        (k, (2,)),
        (v, (2,)),
        (tables.num_blocks, (0,)),
        (tables.blocks, (0, 3)),
        (tables.logical, (0, 1)),
    ]
    dynamic += [
        (t, range(t.dim())) for t in (tables.row, tables.first, tables.seq_len, tables.causal, tables.prefix_len, tables.family) if t is not None
    ]
    for tensor, dims in dynamic:
        for dim in dims:
            torch._dynamo.mark_dynamic(tensor, dim)


def run_step(
    step: Step,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *,
    in_place: bool,
    compiler: Any = "inductor",
) -> None:
    """Attention of one layer into ``out`` (and ``lse``).

    Args:
        step: the plan.
        q, k_cache, v_cache, out, lse: as a backend's ``run`` gets them, NHD or packed.
        sinks, slopes: ``[Hq]``.
        in_place: read whole pages where they lie. Only a kernel that skips the blocks it is not given may: one that
            multiplies the whole pool by weights of 0 returns NaN for a pool that holds some.
        compiler: backend of ``torch.compile``; ``None`` runs torch's own plain formulas, in fp32.
    """
    spread = spread_of(k_cache, v_cache) if in_place and not step.packed else None
    total = torch.full((step.num_tokens, q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
    result = torch.zeros((*total.shape, v_cache.shape[-1]), dtype=torch.float32, device=q.device)
    with torch.no_grad(), _plain() if compiler is None else nullcontext():
        for part in step.parts(spread is not None):
            got, weight = _run_part(step, part, spread, q, k_cache, v_cache, slopes, compiler)
            before = total[part.written]
            after = torch.logaddexp(before, weight)
            total[part.written] = after
            result[part.written] = result[part.written] * _share(before, after) + got * _share(weight, after)
        if sinks is not None:
            after = torch.logaddexp(total, sinks.to(torch.float32))
            result, total = result * _share(total, after), after
        out[: step.num_tokens] = result.to(out.dtype)
        if lse is not None:
            lse[: step.num_tokens] = total


def _run_part(
    step: Step, part: Part, spread: int | None, q: Tensor, k_cache: Tensor, v_cache: Tensor, slopes: Tensor | None, compiler: Any
) -> tuple[Tensor, Tensor]:
    """``out`` and log-sum-exp of the part's own tokens, in fp32."""
    tiles = q.index_select(0, part.tokens).view(-1, part.size, *q.shape[1:]).transpose(1, 2)  # [T, Hq, size, D]
    if part.source is None:
        assert spread is not None
        tables = part.over(k_cache.shape[0], spread)
        k, v = pool_view(k_cache, spread), pool_view(v_cache, spread)
    else:
        spread, tables = 1, part.tables
        k, v = (_copied(pool, part) for pool in (k_cache, v_cache))
    if compiler is None:  # the plain formulas round weights to the values' type, so that type is fp32
        tiles, k, v = tiles.float(), k.float(), v.float()
        out, lse = attend(step.look, spread, tiles, k, v, tables, slopes, None)
    else:
        _of_any_length(tiles, k, v, tables)
        options = None if q.device.type == "cpu" else kernel_options(part.size, step.look.page_size, q.shape[-1], q.dtype)
        form = tiles.shape[1:], k.shape[1], q.dtype, q.device.type
        out, lse = compiled(step.look, spread, form, compiler)(tiles, k, v, tables, slopes, options)
    flat = out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)  # [T * size, Hq, ...]
    return flat[0][part.places].float(), flat[1][part.places].float()


def kernel_options(tile: int, page_size: int, head_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """A fixed choice of the Triton template's tiles, as torch's own may be larger than a page.

    Two stages of keys and values beside the queries stay within the 99 KiB of shared memory that consumer GPUs have.
    """
    widest = max(16, min(64, 2**14 // (2 ** (head_size - 1).bit_length() * dtype.itemsize)))
    return {
        "BACKEND": "TRITON",  # the one that takes every group size, rather than what a length suggests
        "FLOAT32_PRECISION": "'ieee'",  # fp32 means fp32, whatever the process allows elsewhere
        "BLOCK_M": min(tile, widest),
        "BLOCK_N": min(page_size, widest),
        "num_stages": 2,
    }


def _share(part: Tensor, total: Tensor) -> Tensor:
    """What a part weighs in the total; nothing weighs nothing."""
    return torch.exp(part - torch.where(total == -torch.inf, 0.0, total))[..., None]


def _copied(cache: Tensor, part: Part) -> Tensor:
    """``[1, Hkv, places, size]``: the part's blocks, with zeros where they are no row's; a weight of 0 would not stop NaN."""
    assert part.source is not None and part.kept is not None
    keys = cache.index_select(0, part.source)
    keys = keys.flatten(0, 1) if keys.dim() == 4 else keys
    return torch.where(part.kept[:, None, None], keys, 0)[None].transpose(1, 2)


def spread_of(k_cache: Tensor, v_cache: Tensor) -> int | None:
    """How many pages' room lies from one page to the next if both pools are views of one run of keys; otherwise ``None``."""
    found = set()
    for pool in (k_cache, v_cache):
        page = pool.shape[1] * pool.stride(1)
        if page == 0 or pool.stride(0) % page or pool.stride(0) == 0:
            return None
        found.add(pool.stride(0) // page)
    return found.pop() if len(found) == 1 else None


def pool_view(cache: Tensor, spread: int) -> Tensor:
    """A pool ``[pages, page, Hkv, D]`` as ``[1, Hkv, places, D]``, where page ``i`` starts at place ``i * spread * page``."""
    pages, page, heads, size = cache.shape
    places = ((pages - 1) * spread + 1) * page
    return cache.as_strided((1, heads, places, size), (places * cache.stride(1), cache.stride(2), cache.stride(1), cache.stride(3)))


@contextmanager
def _plain() -> Iterator[None]:
    """torch's formulas without a compiler: its own switch for that, which a compiled call does not read."""
    with _LOCK, full_precision():
        before = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
        try:
            yield
        finally:
            flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before
