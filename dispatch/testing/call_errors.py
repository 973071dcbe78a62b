"""Checks that wrong calls raise ``ValueError`` or ``TypeError`` that name the argument, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attnmux.dispatch.plan import Plan
from attnmux.testing.cases import Case
from attnmux.testing.check import Check, require
from attnmux.testing.measure import attention_for
from attnmux.testing.numerics import case_for
from attnmux.testing.sampling import Subject, Variant, variants

Arguments = dict[str, Any]
Mistake = Callable[[Arguments], Arguments]


def checks(subject: Subject) -> Iterator[Check]:
    """Need the device; one set for the plain spec of each claim, one for each per-layer input that it takes."""
    wanted = ({"sinks"}, {"alibi_linear"}, {"alibi_sqrt"})
    for variant in variants(subject):
        if (
            variant.lengths == "exact"
            and not variant.label.endswith("-fp32")
            and (variant.label.endswith("-plain") or {feature.name for feature in variant.features} in wanted)
        ):
            for name, (argument, mistake) in _mistakes(variant).items():
                summary = f"{name.replace('-', ' ')}: raises, names {argument}, writes nothing"
                yield Check(f"errors/{variant.label}-{name}", subject.name, summary, _body(subject, variant, argument, mistake))


def _mistakes(variant: Variant) -> dict[str, tuple[str, Mistake]]:
    """What to call it, the argument that the error must name, and the change to the arguments of ``run``."""
    found: dict[str, tuple[str, Mistake]] = {
        "q-dtype": ("q", lambda a: {**a, "q": a["q"].to(torch.float64)}),
        "q-heads": ("q", lambda a: {**a, "q": a["q"][:, :0]}),
        "q-rank": ("q", lambda a: {**a, "q": a["q"][None]}),
        "q-short": ("q", lambda a: {**a, "q": a["q"][:1], "out": a["out"][:1]}),
        "q-strided": ("q", lambda a: {**a, "q": torch.empty((*a["q"].shape, 2), dtype=a["q"].dtype, device=a["q"].device)[..., 0]}),
        "k-dtype": ("k_cache", lambda a: {**a, "k_cache": a["k_cache"].to(torch.float64)}),
        "v-heads": ("v_cache", lambda a: {**a, "v_cache": a["v_cache"][..., :-1]}),
        "out-dtype": ("out", lambda a: {**a, "out": a["out"].double()}),
        "out-shape": ("out", lambda a: {**a, "out": a["out"][:, :, :-1]}),
        "q-no-tensor": ("q", lambda a: {**a, "q": None}),
    }
    if variant.spec.sinks:
        found["sinks-missing"] = ("sinks", lambda a: {**a, "sinks": None})
        found["sinks-short"] = ("sinks", lambda a: {**a, "sinks": a["sinks"][:-1]})
    else:
        found["sinks-unasked"] = ("sinks", lambda a: {**a, "sinks": torch.zeros(variant.spec.num_q_heads, device=a["q"].device)})
    if variant.spec.alibi:
        found["slopes-missing"] = ("alibi_slopes", lambda a: {**a, "alibi_slopes": None})
        found["slopes-dtype"] = ("alibi_slopes", lambda a: {**a, "alibi_slopes": a["alibi_slopes"].double()})
    if variant.spec.kv_scale is None:
        found["scale-unasked"] = ("k_scale", lambda a: {**a, "k_scale": 1.0})
    return found


def _body(subject: Subject, variant: Variant, argument: str, mistake: Mistake) -> Callable[[], None]:
    def body() -> None:
        case = case_for(subject, variant)
        attention = attention_for(subject, case)
        plan = attention.plan(case.batch)
        out, _ = case.outputs()
        right: Arguments = {"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache, "out": out, **case.layer}
        _expect_refusal(attention.run, plan, case, mistake(right), argument)
        require(bool(torch.isnan(out).all()), "out was written by a call that raised")

    return body


def _expect_refusal(run: Callable[..., Any], plan: Plan, case: Case, arguments: Arguments, argument: str) -> None:
    before = [cache.clone().contiguous().view(torch.uint8) for cache in (case.k_cache, case.v_cache)]
    try:
        run(plan=plan, **arguments)
    except (TypeError, ValueError) as error:
        require(re.search(rf"\b{argument}\b", str(error)), f"the error does not name {argument}: {error}")
    else:
        require(False, f"a wrong {argument} was accepted")
    after = [cache.contiguous().view(torch.uint8) for cache in (case.k_cache, case.v_cache)]
    require(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "the cache was written by a call that raised")
