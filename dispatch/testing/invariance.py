"""Checks of what must not change an answer: page ids, plans made anew, and, where claimed, the rest of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from attnmux.testing.cases import make_case
from attnmux.testing.check import Check, Skip, require
from attnmux.testing.measure import attention_for, expect_close, oracle, run_case, run_plan
from attnmux.testing.numerics import case_for
from attnmux.testing.rows import Row, mixed_rows
from attnmux.testing.sampling import Subject, Variant, variants

FAR = 2**31
"""Elements between pages that a 32-bit offset cannot count."""


def checks(subject: Subject) -> Iterator[Check]:
    """Need the device."""
    for variant in variants(subject):
        if variant.lengths == "exact" and variant.label.endswith(("-plain", "-batch_invariant")):
            yield from _checks_of(subject, variant)


def _checks_of(subject: Subject, variant: Variant) -> Iterator[Check]:
    def check(name: str, summary: str, body: object) -> Check:
        return Check(f"invariance/{variant.label}-{name}", subject.name, summary, lambda: body(subject, variant))  # type: ignore[operator]

    if variant.spec.batch_invariant:
        yield check("alone", "a row's bits are those of the row alone", _alone)
    if variant.label.endswith("-plain"):
        yield check("page-ids", "low and high page ids give the same bits", _page_ids)
        yield check("refreshed-plan", "a plan made anew in place equals a new plan", _refreshed_plan)
        yield check("live-plans", "a plan runs as before after another was made and run", _live_plans)
        yield check("far-pages", "offsets beyond 32 bits are right", _far_pages)


def _precise(subject: Subject, variant: Variant) -> Variant:
    """In fp32 where that is claimed: rounding to 16 bits hides most differences."""
    spec = variant.spec.replace(dtype=torch.float32)
    classes = subject.classes(spec)
    return dataclasses.replace(variant, spec=spec, classes=classes) if classes else variant


def _alone(subject: Subject, variant: Variant) -> None:
    for long in (False, True):
        case = case_for(subject, _precise(subject, variant), long)
        together = run_case(subject, case)
        for row in range(len(case.rows)):
            single = run_case(subject, case.alone(row))
            same = single.same_bits(together, slice(0, case.rows[row].q_len), case.tokens(row))
            shape = f"q_len {case.rows[row].q_len}, kv_len {case.rows[row].kv_len}"
            require(same, f"row {row} ({shape}) has other bits alone than in a batch of {len(case.rows)} rows")


def _page_ids(subject: Subject, variant: Variant) -> None:
    if variant.spec.page_size is None:
        raise Skip("packed keys have no page ids")
    variant = _precise(subject, variant)
    rows = mixed_rows(variant.spec, variant.classes)
    cases = [make_case(variant.spec, rows, device=subject.device.torch_device, seed=subject.seed, place=place) for place in ("low", "high")]
    low, high = (run_case(subject, case) for case in cases)
    tokens = slice(0, cases[0].batch.num_tokens)
    require(low.same_bits(high, tokens, tokens), "the same keys on other pages give other bits")


def _refreshed_plan(subject: Subject, variant: Variant) -> None:
    first, second = (case_for(dataclasses.replace(subject, seed=seed), variant) for seed in (subject.seed, subject.seed + 1))
    attention = attention_for(subject, first)
    plan = attention.plan(first.batch)
    expect_close(first, run_plan(subject, plan, first), oracle(first))
    attention.plan(second.batch, into=plan)
    expect_close(second, run_plan(subject, plan, second), oracle(second))


def _live_plans(subject: Subject, variant: Variant) -> None:
    first = case_for(subject, variant)
    second = make_case(variant.spec, first.rows[::-1], device=subject.device.torch_device, seed=subject.seed + 1)
    attention = attention_for(subject, first)
    plans = [attention.plan(case.batch) for case in (first, second)]
    for plan, case in zip((*plans, *plans), (first, second, first, second), strict=True):
        expect_close(case, run_plan(subject, plan, case), oracle(case))


def _far_pages(subject: Subject, variant: Variant) -> None:
    spec, device = variant.spec, subject.device
    if device.type == "cpu" or spec.page_size is None or subject.quick:
        raise Skip("needs an accelerator with 16 GiB free, pages, and no quick run")
    row_class = variant.classes[0]
    row = Row(1 if row_class == "decode" else 17, max(spec.page_size, 17), spans=((0, 17),) if row_class == "image" else ())
    near = make_case(spec, (row,), device=device.torch_device, seed=subject.seed, place="low")
    pages = len(near.places[0])
    k_page, v_page = near.k_cache[0].numel(), near.v_cache[0].numel()
    try:
        storage = torch.empty(pages * FAR + k_page + v_page, dtype=spec.kv_dtype, device=near.q.device)
    except RuntimeError as error:
        raise Skip(f"not enough memory: {error}") from None
    pools = []
    for cache, start in ((near.k_cache, 0), (near.v_cache, k_page)):
        pools.append(pool := storage.as_strided(cache[:pages].shape, (FAR, *cache[0].contiguous().stride()), start))
        pool.view(torch.uint8).copy_(cache[:pages].view(torch.uint8)) if spec.kv_dtype.itemsize == 1 else pool.copy_(cache[:pages])
    far = dataclasses.replace(near, k_cache=pools[0], v_cache=pools[1])
    expect_close(far, run_case(subject, far), oracle(near))
