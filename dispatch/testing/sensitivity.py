"""Checks that each claimed feature matters: negative controls, and keys that only those who may see them notice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attnmux.testing.check import Check, require
from attnmux.testing.features import Feature
from attnmux.testing.measure import Answer, Oracle, distance, oracle, run_case, truth
from attnmux.testing.numerics import case_for
from attnmux.testing.sampling import Subject, Variant, variants

POWER = 4.0
"""A control must move the oracle by this many times the allowed error, or the case could not tell."""


def checks(subject: Subject) -> Iterator[Check]:
    """Need the device. One control check and one visibility check for each feature of each claim, in fp32 where that is claimed."""
    for variant in _most_precise(subject):
        for feature in variant.features:
            if feature.controls and (not feature.image_only or "image" in variant.classes):
                summary = f"the answer is not the one without {feature.name}"
                yield Check(f"features/{variant.label}", subject.name, summary, lambda v=variant, f=feature: _matters(subject, v, f))  # type: ignore[misc]
            if feature.name == "return_lse":
                yield Check(f"features/{variant.label}", subject.name, "the log-sum-exp is natural", lambda v=variant: _natural_log(subject, v))  # type: ignore[misc]
        summary = "a key that changes is noticed by exactly the tokens that may see it"
        yield Check(f"visibility/{variant.label}", subject.name, summary, lambda v=variant: _visibility(subject, v))  # type: ignore[misc]


def _most_precise(subject: Subject) -> list[Variant]:
    """Of each claim the variants of one feature or none, the last of each: fp32 comes after 16 bits."""
    chosen: dict[tuple[str, str], Variant] = {}
    for variant in variants(subject):
        if len(variant.features) <= 1 and variant.lengths == "exact":
            what = variant.features[0].name if variant.features else variant.label.removesuffix("-fp32")
            chosen[variant.label.partition("-")[0], what] = variant
    return list(chosen.values())


def _matters(subject: Subject, variant: Variant, feature: Feature) -> None:
    case = case_for(subject, variant).revealed()  # so that who ignores a mask reads keys, not NaN, and is told what he did
    want = oracle(case)
    answer = run_case(subject, case)
    n = case.batch.num_tokens
    for control in feature.controls:
        other = truth(case.without(**control))
        said = ", ".join(f"{name}={value}" for name, value in control.items())
        if distance(other, want.out) < POWER * want.out_allowed:
            raise RuntimeError(f"the case proves nothing: the oracle with {said} differs too little")
        require(distance(answer.out[:n], other) > want.out_allowed, f"the answer is the one for {said}: {feature.name} is ignored")
    require(distance(answer.out[:n], want.out) <= want.out_allowed, f"{feature.name}: off by {distance(answer.out[:n], want.out):.2e}")


def _natural_log(subject: Subject, variant: Variant) -> None:
    case = case_for(subject, variant)
    want = oracle(case)
    lse = run_case(subject, case).lse
    assert lse is not None
    got = lse[: case.batch.num_tokens].double()
    ln2 = float(torch.log(torch.tensor(2.0, dtype=torch.float64)))
    require(distance(got * ln2, want.lse) > want.lse_allowed, "the log-sum-exp is to base 2, wanted the natural logarithm")
    require(distance(got, want.lse) <= want.lse_allowed, f"the log-sum-exp is off by {distance(got, want.lse):.2e}, allowed {want.lse_allowed:.2e}")


def _visibility(subject: Subject, variant: Variant) -> None:
    case = case_for(subject, variant)
    want, answer = oracle(case), run_case(subject, case)
    keyed = [i for i, row in enumerate(case.rows) if row.q_len and row.kv_len > 1]
    for where in (0.5,) if subject.quick else (0.0, 0.5, 1.0):
        for rows in (keyed[::2], keyed[1::2]):  # the others must not notice
            places = [(row, int(where * (case.rows[row].kv_len - 1))) for row in rows]
            with case.changed_keys(places):
                _hold(places, want, answer, truth(case), run_case(subject, case))


def _hold(places: list[tuple[int, int]], before: Oracle, was: Answer, after: Tensor, now: Answer) -> None:
    n = len(after)
    moved = (after - before.out).abs().amax(-1)  # [tokens, Hq]
    differs = (was.out[:n] != now.out[:n]).any(-1)
    where = ", ".join(f"key {key} of row {row}" for row, key in places)
    leaks = differs & (moved == 0)
    require(not bool(leaks.any()), f"{where} changed, and {int(leaks.any(-1).sum())} query tokens that may not see them noticed")
    blind = ~differs & (moved > POWER * before.out_allowed)
    require(not bool(blind.any()), f"{where} changed, and {int(blind.any(-1).sum())} query tokens that see them did not notice")
