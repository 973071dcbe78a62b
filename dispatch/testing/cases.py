"""Inputs of one attention call, made from a spec, rows and a seed: what the kit, ``attnmux check``, tests and benchmarks share.

Everything a backend must not read is NaN: pages that belong to nobody, the tail of a row's last page, gaps between
packed rows, padding tokens, ``out`` and ``lse``. Block-table entries that no token needs are -1, and what lies just
before the pool is NaN too, so that following a -1 shows instead of crashing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnmux.dispatch.backend import LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.query import Lengths
from attnmux.dispatch.spec import FP8_DTYPES, AttentionSpec
from attnmux.testing.layout import Place, as_bytes, make_batch, make_pools, place_rows
from attnmux.testing.rows import Row, mixed_rows

PADDING_TOKENS = 3


@dataclass(slots=True, eq=False)
class Case:
    """One call's inputs.

    Args:
        spec, rows: the question.
        batch: the rows as the engine passes them; block-table entries that nobody may see are -1.
        q: ``[tokens + padding, Hq, D]``, a view of a wider tensor.
        k_cache, v_cache: pools as the spec lays them out, views of one storage where their shapes agree.
        layer: per-layer inputs by name, as ``Attention.run`` takes them.
        places: pages of each row in order (packed: the row's first key).
        lengths: what the host mirrors promise.
    """

    spec: AttentionSpec
    rows: tuple[Row, ...]
    batch: Batch
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    layer: dict[str, Any]
    places: tuple[tuple[int, ...], ...]
    lengths: Lengths = "exact"

    @property
    def layer_args(self) -> LayerArgs:
        return LayerArgs(**self.layer)

    def tokens(self, row: int) -> slice:
        """Where the row's query tokens stand in q and out."""
        start = sum(r.q_len for r in self.rows[:row])
        return slice(start, start + self.rows[row].q_len)

    def outputs(self) -> tuple[Tensor, Tensor | None]:
        """``out`` and, where asked for, ``lse``, full of NaN."""
        shape = (self.q.shape[0], self.spec.num_q_heads)
        out = torch.full((*shape, self.spec.v_head_size), torch.nan, dtype=self.spec.dtype, device=self.q.device)
        return out, torch.full(shape, torch.nan, device=self.q.device) if self.spec.return_lse else None

    def dense(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """The row's queries, keys and values ``[len, heads, size]`` in float64, scales applied."""

        def gathered(cache: Tensor) -> Tensor:
            slots = [_slot(self, cache, row, key).double() for key in range(self.rows[row].kv_len)]
            return torch.stack(slots) if slots else torch.empty(0, self.spec.num_kv_heads, cache.shape[-1], dtype=torch.float64, device=cache.device)

        args = self.layer_args
        q = self.q[self.tokens(row)].double() * _widened(args.q_scale)
        return q, gathered(self.k_cache) * _widened(args.k_scale), gathered(self.v_cache) * _widened(args.v_scale)

    def without(self, **changes: Any) -> Case:
        """The same numbers under a changed spec, what it no longer takes left out: the control of a feature.

        A changed ``kv_dtype`` reads the same bytes as another format. Every key has its page in the table.
        """
        spec = self.spec.replace(**changes)
        layer = {name: value for name, value in self.layer.items() if _takes(spec, name)}
        for name in ("k_scale", "v_scale"):
            if spec.kv_scale == "tensor" and self.spec.kv_scale == "head":
                layer[name] = self.layer[name].mean()
        k, v = (cache.view(spec.kv_dtype) if spec.kv_dtype.itemsize == cache.dtype.itemsize else cache for cache in (self.k_cache, self.v_cache))
        batch = make_batch(spec, self.rows, self.places, self.q.device, self.lengths, hide=False)
        return dataclasses.replace(self, spec=spec, layer=layer, batch=batch, k_cache=k, v_cache=v)

    def revealed(self) -> Case:
        """The same with every key's page in the table, also those that nobody may see."""
        return self.without()

    def alone(self, row: int) -> Case:
        """The row by itself, over the same pool."""
        batch = make_batch(self.spec, self.rows[row : row + 1], self.places[row : row + 1], self.q.device, self.lengths)
        return dataclasses.replace(self, rows=self.rows[row : row + 1], batch=batch, q=self.q[self.tokens(row)], places=self.places[row : row + 1])

    @contextmanager
    def changed_keys(self, places: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Inside, these keys, each a row and a key of it, and their values are others."""
        slots = [(_slot(self, cache, row, key), fill) for row, key in places for cache, fill in ((self.k_cache, 1.5), (self.v_cache, -3.0))]
        before = [as_bytes(slot).clone() for slot, _ in slots]
        for slot, fill in slots:
            as_bytes(slot).copy_(as_bytes(torch.full(slot.shape, fill).to(slot.dtype)))
        try:
            yield
        finally:
            for (slot, _), old in zip(slots, before, strict=True):
                as_bytes(slot).copy_(old)


def make_case(
    spec: AttentionSpec,
    rows: Sequence[Row] | None = None,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    lengths: Lengths = "exact",
    place: Place = "shuffled",
) -> Case:
    """Inputs for one call. Equal arguments give equal numbers on every device, wherever the pages are placed.

    Args:
        spec, rows: the question; ``rows`` defaults to :func:`mixed_rows`.
        device: where the tensors live.
        seed: of the numbers and of the page order.
        lengths: ``"upper_bound"`` makes ``seq_lens_cpu`` larger than the truth.
        place: which pages the rows get: in random order, or the lowest or highest of a larger pool.
    """
    rows = mixed_rows(spec) if rows is None else tuple(rows)
    generator = torch.Generator().manual_seed(seed)
    places, held = place_rows(spec, rows, place, seed)
    k_cache, v_cache = make_pools(spec, held, device)
    queries = torch.full((sum(r.q_len for r in rows) + PADDING_TOKENS, spec.num_q_heads, spec.head_size), torch.nan)
    layer = _layer(spec, generator, device, seed)
    case = Case(spec, rows, make_batch(spec, rows, places, device, lengths), queries, k_cache, v_cache, layer, places, lengths)
    for i, row in enumerate(rows):
        queries[case.tokens(i)] = torch.randn(row.q_len, *queries.shape[1:], generator=generator)
        for cache, heads in ((k_cache, spec.head_size), (v_cache, spec.v_head_size)):
            _store(case, cache, i, torch.randn(row.kv_len, spec.num_kv_heads, heads, generator=generator).to(spec.kv_dtype))
    fused = torch.full(
        (queries.shape[0], spec.num_q_heads + spec.num_kv_heads, spec.head_size), torch.nan
    )  # q is a view, as out of a fused projection
    fused[:, : spec.num_q_heads] = queries
    case.q = fused.to(spec.q_dtype).to(device)[:, : spec.num_q_heads]
    return case


def _store(case: Case, cache: Tensor, row: int, values: Tensor) -> None:
    pool, new = as_bytes(cache), as_bytes(values).to(cache.device)
    if case.spec.page_size is None:
        start = case.places[row][0]
        pool[start : start + len(new)] = new
        return
    nhd = pool if case.spec.kv_layout == "NHD" else pool.transpose(1, 2)
    for i, page in enumerate(case.places[row]):
        part = new[i * case.spec.page_size : (i + 1) * case.spec.page_size]
        nhd[page, : len(part)] = part


def _slot(case: Case, cache: Tensor, row: int, key: int) -> Tensor:
    """A view ``[Hkv, size]`` of one key's place."""
    if case.spec.page_size is None:
        return cache[case.places[row][0] + key]
    page, offset = case.places[row][key // case.spec.page_size], key % case.spec.page_size
    return cache[page, offset] if case.spec.kv_layout == "NHD" else cache[page, :, offset]


def _layer(spec: AttentionSpec, generator: torch.Generator, device: torch.device | str, seed: int) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    if spec.sinks:
        layer["sinks"] = (torch.randn(spec.num_q_heads, generator=generator) + 1).to(torch.float32 if seed % 2 == 0 else spec.dtype)
    if spec.alibi:
        layer["alibi_slopes"] = torch.linspace(0.05, 0.6, spec.num_q_heads)
    if spec.kv_scale == "head":
        layer["k_scale"] = torch.linspace(0.5, 1.3, spec.num_kv_heads)
        layer["v_scale"] = torch.linspace(1.4, 0.6, spec.num_kv_heads)
    elif spec.kv_scale == "tensor":
        layer["k_scale"], layer["v_scale"] = torch.tensor(0.7), 1.3  # a device tensor and a host float
    if spec.q_dtype in FP8_DTYPES:
        layer["q_scale"] = 0.9
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in layer.items()}


def _takes(spec: AttentionSpec, name: str) -> bool:
    if name in ("k_scale", "v_scale"):
        return spec.kv_scale is not None
    return {"sinks": spec.sinks, "alibi_slopes": spec.alibi is not None, "q_scale": spec.q_dtype in FP8_DTYPES}[name]


def _widened(scale: Tensor | float | None) -> Tensor | float:
    if scale is None:
        return 1.0
    if isinstance(scale, Tensor):
        return scale.double()[:, None] if scale.dim() == 1 else scale.double()
    return scale
