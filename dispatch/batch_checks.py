"""Checks of a batch against its spec. None synchronises unless asked to."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from attnmux.dispatch.batch import Batch
from attnmux.dispatch.errors import complaint
from attnmux.dispatch.expect import expect_optional, expect_tensor
from attnmux.dispatch.rows import visible_keys
from attnmux.dispatch.spec import AttentionSpec, Limits


def check_batch(spec: AttentionSpec, batch: Batch, device: torch.device, limits: Limits | None, synchronise: bool) -> None:
    """A batch against its spec. ``synchronise`` also reads device values.

    Raises:
        TypeError, ValueError: naming the field, its value and what was wanted.
    """
    if not isinstance(batch, Batch):
        raise TypeError(complaint("batch", type(batch).__name__, "attnmux.Batch"))
    batch.forget()  # what an earlier step copied to the host says nothing of this one
    int32 = (torch.int32,)
    seq_lens = expect_tensor("seq_lens", batch.seq_lens, ("seqs",), int32, device)
    seqs = seq_lens.shape[0]
    expect_tensor("query_start_loc", batch.query_start_loc, (seqs + 1,), int32, device)
    if batch.lengths not in ("exact", "upper_bound"):
        raise ValueError(complaint("lengths", repr(batch.lengths), "'exact' or 'upper_bound'"))
    if batch.lengths == "upper_bound" and batch.seq_lens_cpu is None:
        raise ValueError("lengths='upper_bound' without seq_lens_cpu: the bound itself is missing")
    expect_optional("block_table", batch.block_table, spec.page_size is not None, "page_size=None means packed keys", (seqs, "cols"), int32, device)
    expect_optional("kv_start_loc", batch.kv_start_loc, spec.page_size is None, "keys lie in pages", (seqs + 1,), int32, device)
    expect_optional("causal", batch.causal, spec.causal == "per_sequence", f"the spec says causal={spec.causal}", (seqs,), (torch.bool,), device)
    expect_optional("prefix_lens", batch.prefix_lens, spec.rswa_window is not None, "the spec has no rswa_window", (seqs,), int32, device)
    for name in ("query_lens_cpu", "seq_lens_cpu"):
        _check_mirror(name, batch)
    if synchronise:
        _check_device_values(batch)
    for lengths in (batch, _with_device_lengths(batch)) if synchronise and batch.lengths == "upper_bound" else (batch,):
        _check_lengths(spec, lengths)
        _check_spans(spec, lengths)
    if limits is not None:
        _check_limits(batch, limits)


def _check_mirror(name: str, batch: Batch) -> None:
    value, seqs = getattr(batch, name), batch.num_seqs
    if value is None:
        return
    if isinstance(value, Tensor):
        raise TypeError(complaint(name, "a tensor", "a sequence of ints", f"pass {name}.tolist() of a host tensor"))
    if isinstance(value, Iterator):  # it would be at its end when the batch is planned again
        raise TypeError(complaint(name, type(value).__name__, "a sequence of ints"))
    try:
        numbers = batch.query_lens if name == "query_lens_cpu" else batch.key_lens
    except TypeError:
        raise TypeError(complaint(name, repr(value), f"{seqs} ints")) from None
    if len(numbers) != seqs:
        raise ValueError(complaint(name, f"{len(numbers)} long", f"{seqs}, one a row"))
    if numbers and min(numbers) < 0:
        raise ValueError(complaint(name, min(numbers), "0 or more"))


def _check_device_values(batch: Batch) -> None:
    starts, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    if starts[0] != 0 or any(b < a for a, b in pairwise(starts)):
        raise ValueError(complaint("query_start_loc", starts, "0 first and never decreasing"))
    if any(n < 0 for n in lens):
        raise ValueError(complaint("seq_lens", min(lens), "0 or more"))
    if batch.query_lens_cpu is not None:
        actual = [b - a for a, b in pairwise(starts)]
        if actual != list(batch.query_lens):
            raise ValueError(complaint("query_lens_cpu", list(batch.query_lens), f"the device's {actual}"))
    if batch.seq_lens_cpu is not None:
        exact = batch.lengths == "exact"
        if any(m < n or (exact and m != n) for m, n in zip(batch.key_lens, lens, strict=True)):
            raise ValueError(complaint("seq_lens_cpu", list(batch.key_lens), f"{'the' if exact else 'no less than the'} device's {lens}"))
    if batch.kv_start_loc is not None:
        starts = batch.kv_start_loc.tolist()
        for row, (a, b, n) in enumerate(zip(starts, starts[1:], lens, strict=False)):
            if a < 0 or b - a < n:
                raise ValueError(complaint(f"kv_start_loc of row {row}", f"{a} to {b}", f"room for its {n} keys"))
    if batch.prefix_lens is not None and bool((batch.prefix_lens < 0).any()):
        raise ValueError(complaint("prefix_lens", int(batch.prefix_lens.min()), "0 or more"))


def _check_lengths(spec: AttentionSpec, batch: Batch) -> None:
    capacity = None if batch.block_table is None or spec.page_size is None else batch.block_table.shape[1] * spec.page_size
    decoder_like = spec.attn_type != "cross"
    needs_host = capacity is not None or decoder_like
    if not needs_host:
        return
    fits = capacity is None or batch.longest_keys <= capacity
    if fits and not (decoder_like and min(batch.key_lens, default=0) < batch.longest_query):
        return  # the usual case, told without comparing row by row
    for row, (q_len, kv_len) in enumerate(zip(batch.query_lens, batch.key_lens, strict=True)):
        if capacity is not None and kv_len > capacity and q_len:
            raise ValueError(
                complaint(
                    f"block_table of row {row}",
                    f"{batch.block_table.shape[1]} columns wide, {capacity} keys",  # type: ignore[union-attr]
                    f"room for its {kv_len} keys",
                    "widen the table",
                )
            )
        if decoder_like and 0 < kv_len < q_len and batch.lengths == "exact":  # of a bound it says nothing: the row may be empty
            raise ValueError(complaint(f"seq_lens of row {row}", kv_len, f"at least its {q_len} query tokens", "seq_lens counts the new keys too"))


def _check_spans(spec: AttentionSpec, batch: Batch) -> None:
    if batch.mm_spans is None:
        return
    if spec.mm_prefix is None:
        raise ValueError("mm_spans are given, but the spec has no mm_prefix: leave them out, or say how spans and windows combine")
    if len(batch.mm_spans) != batch.num_seqs:
        raise ValueError(complaint("mm_spans", f"{len(batch.mm_spans)} long", f"{batch.num_seqs}, one list a row"))
    for row, spans in enumerate(batch.mm_spans):
        if not _is_sequence(spans):
            raise TypeError(complaint(f"mm_spans of row {row}", repr(spans), "a list of spans"))
        for span in spans:
            numbers = _is_sequence(span) and len(span) in (2, 3) and all(isinstance(n, int) and not isinstance(n, bool) for n in span)
            if not numbers or not 0 <= span[0] < span[1]:
                raise ValueError(complaint(f"mm_spans of row {row}", repr(span), "(start, end) or (start, end, group) with 0 <= start < end"))
            if span[0] < batch.key_lens[row] < span[1] and batch.lengths == "exact":
                raise ValueError(
                    complaint(
                        f"mm_spans of row {row}",
                        repr(span),
                        f"an end no later than its {batch.key_lens[row]} keys",
                        "schedule a span's tokens in one step",
                    )
                )
        ordered = sorted(spans, key=lambda s: s[0])
        for before, after in pairwise(ordered):
            if after[0] < before[1]:
                raise ValueError(complaint(f"mm_spans of row {row}", f"{tuple(before)!r} and {tuple(after)!r}", "spans that do not overlap"))


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _check_limits(batch: Batch, limits: Limits) -> None:
    longest = batch.longest_keys
    if longest > limits.max_seq_len:
        longest = max(map(operator.mul, batch.key_lens, map(bool, batch.query_lens)))  # only rows with tokens count
    asked = {
        "max_num_seqs": batch.num_seqs,
        "max_num_tokens": batch.num_tokens,
        "max_seq_len": longest,
        "max_query_len": batch.longest_query,
    }
    for name, value in asked.items():
        if value > getattr(limits, name):
            raise ValueError(complaint(f"the batch's {name.removeprefix('max_')}", value, f"at most limits.{name}={getattr(limits, name)}"))


def page_bounds(spec: AttentionSpec, batch: Batch) -> tuple[int, int] | None:
    """The lowest and highest page id (packed: key index) that the batch may read, or ``None`` when it reads none. Synchronises."""
    seen: list[Tensor] = []
    prefix = [0] * batch.num_seqs if batch.prefix_lens is None else batch.prefix_lens.tolist()
    exact = batch if batch.lengths == "exact" else _with_device_lengths(batch)
    for row in range(batch.num_seqs):
        for lo, hi in visible_keys(spec, exact, row, prefix[row]):
            if lo >= hi:
                continue
            if batch.block_table is not None and spec.page_size is not None:
                seen.append(batch.block_table[row, lo // spec.page_size : -(-hi // spec.page_size)])
            elif batch.kv_start_loc is not None:
                seen.append(batch.kv_start_loc[row : row + 1] + torch.tensor([lo, hi - 1], dtype=torch.int32, device=batch.kv_start_loc.device))
    if not seen:
        return None
    ids = torch.cat(seen)
    return int(ids.min()), int(ids.max())


def _with_device_lengths(batch: Batch) -> Batch:
    return Batch(
        batch.query_start_loc,
        batch.seq_lens,
        query_lens_cpu=batch.query_lens,
        seq_lens_cpu=batch.seq_lens.tolist(),
        mm_spans=batch.mm_spans,
    )
