"""Checks of every claim's answers against the float64 oracle, over ragged mixed batches in dirty memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnmux.dispatch.backend import LayerArgs
from attnmux.dispatch.spec import FP8_DTYPES, AttentionSpec, Limits
from attnmux.testing.cases import Case, make_case
from attnmux.testing.check import Check, require
from attnmux.testing.measure import attention_for, expect_close, oracle, run_case
from attnmux.testing.rows import Row, mixed_rows
from attnmux.testing.sampling import Subject, Variant, variants


def checks(subject: Subject) -> Iterator[Check]:
    """Need the device."""
    found = list(variants(subject))
    for variant in found:
        summary = f"the answer for {variant.spec.describe()} equals the oracle's"
        yield Check(f"numerics/{variant.label}", subject.name, summary, lambda v=variant: _equals_oracle(subject, v))  # type: ignore[misc]
    plain = [variant for variant in found if variant.label.endswith("-plain")]
    for variant in plain:
        summary = "rows of hundreds of keys: tiles and splits are joined right"
        yield Check(f"numerics/{variant.label}-long", subject.name, summary, lambda v=variant: _equals_oracle(subject, v, long=True))  # type: ignore[misc]
        summary = "with limits that just hold the batch, after warmup: the workspace is large enough"
        yield Check(f"numerics/{variant.label}-limits", subject.name, summary, lambda v=variant: _within_limits(subject, v))  # type: ignore[misc]
    for variant in found:
        if (
            not variant.features
            or {f.name for f in variant.features} <= {"hnd", "packed"}
            or (len(variant.features) == 1 and variant.spec.kv_dtype in FP8_DTYPES)
        ):
            summary = "write_kv stores every key at its slot, skips -1 and touches nothing else"
            yield Check(f"numerics/{variant.label}-write_kv", subject.name, summary, lambda v=variant: _writes(subject, v))  # type: ignore[misc]


def case_for(subject: Subject, variant: Variant, long: bool = False) -> Case:
    """The case of a variant: rows of the classes it claims."""
    rows = mixed_rows(variant.spec, variant.classes, long=long)
    if "image" not in variant.classes:  # under upper bounds a row with any span counts as an image row
        rows = tuple(_plain(row) for row in rows) if variant.lengths == "upper_bound" else rows
    return make_case(variant.spec, rows, device=subject.device.torch_device, seed=subject.seed, lengths=variant.lengths)


def _plain(row: Row) -> Row:
    return Row(row.q_len, row.kv_len, (), row.prefix_len, row.causal)


def _equals_oracle(subject: Subject, variant: Variant, long: bool = False) -> None:
    case = case_for(subject, variant, long)
    expect_close(case, run_case(subject, case), oracle(case))


def _within_limits(subject: Subject, variant: Variant) -> None:
    case = case_for(subject, variant)
    batch = case.batch
    limits = Limits(batch.num_seqs, batch.num_tokens, max(batch.key_lens), max(batch.query_lens))
    attention_for(subject, case, limits).warmup()
    expect_close(case, run_case(subject, case, limits), oracle(case))


def _writes(subject: Subject, variant: Variant) -> None:
    spec = variant.spec
    case = make_case(spec, (Row(5, 2 * (spec.page_size or 8) + 3),), device=subject.device.torch_device, seed=subject.seed)
    backend = attention_for(subject, case).backend(subject.name)
    generator = torch.Generator().manual_seed(subject.seed)
    k, v = (torch.randn(7, spec.num_kv_heads, size, generator=generator).to(spec.dtype) for size in (spec.head_size, spec.v_head_size))
    k[6] = 1e4  # beyond every fp8 format: must saturate
    slots = [3, -1, 0, 7, -1, 1, 2]
    wanted = [_written(cache, new, slots, spec, scale) for cache, new, scale in zip(*_sides(case, k, v), strict=True)]
    device = case.q.device
    layer = LayerArgs(k_scale=case.layer.get("k_scale"), v_scale=case.layer.get("v_scale"))
    backend.write_kv(k.to(device), v.to(device), case.k_cache, case.v_cache, torch.tensor(slots, device=device), layer)
    for name, cache, want in zip(("k_cache", "v_cache"), (case.k_cache, case.v_cache), wanted, strict=True):
        got = cache.cpu()
        wrong = got.contiguous().view(torch.uint8) != want.contiguous().view(torch.uint8)
        require(not bool(wrong.any()), f"{name}: {int(wrong.sum())} bytes differ from what write_kv should leave there")


def _sides(case: Case, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[object, object]]:
    return (case.k_cache, case.v_cache), (k, v), (case.layer.get("k_scale"), case.layer.get("v_scale"))


def _written(cache: Tensor, new: Tensor, slots: list[int], spec: AttentionSpec, scale: object) -> Tensor:
    """The pool after the write, by a loop over tokens in plain torch."""
    pool = cache.cpu().clone()
    nhd = pool.transpose(1, 2) if spec.page_size is not None and spec.kv_layout == "HND" else pool
    for value, slot in zip(new, slots, strict=True):
        if slot < 0:
            continue
        if spec.kv_dtype in FP8_DTYPES:
            largest = torch.finfo(spec.kv_dtype).max
            divisor = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32).cpu().reshape(-1, 1)
            value = (value.float() / divisor).clamp(-largest, largest)
        place = nhd[slot] if spec.page_size is None else nhd[slot // spec.page_size, slot % spec.page_size]
        place.copy_(value.to(spec.kv_dtype))
    return pool
