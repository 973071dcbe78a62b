"""Random specs: selection answers each of them, the same way twice, with a reason for everything, and what it selects runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attnmux
from attnmux.dispatch import host
from attnmux.dispatch.query import Query
from attnmux.dispatch.registry import Registry
from attnmux.dispatch.selection import Selection
from attnmux.dispatch.spec import CHOICES, DTYPES, SPEC_FIELD_NAMES, AttentionSpec, spec_from_dict
from attnmux.testing.measure import oracle
from attnmux.testing.strategies import cases, specs

DEVICES = (
    "cuda:sm75",
    "cuda:sm80",
    "cuda:sm86",
    "cuda:sm89",
    "cuda:sm90",
    "cuda:sm100",
    "cuda:sm103",
    "cuda:sm120",
    "rocm:gfx90a",
    "rocm:gfx942",
    "rocm:gfx950",
    "xpu",
    "cpu",
)
DRAWN, RELATIVES = 2500, 4
"""Specs that hypothesis draws, and how many are made from each: drawing costs ten times as much as selecting."""


@pytest.fixture(scope="module", autouse=True)
def built_ins() -> Iterator[Registry]:
    with host.using(Registry(entry_points=False)) as made:
        yield made


def relatives(spec: AttentionSpec, seed: int) -> list[AttentionSpec]:
    """The spec and others like it, what an engine and another model of the family would ask."""
    choose = random.Random(seed).choice
    found = [spec]
    while len(found) < RELATIVES:
        changes: dict[str, Any] = {
            "page_size": choose((None, 1, 8, 16, 32, 48, 64, 128, 256, 1056)),
            "kv_layout": choose(("NHD", "HND")),
            "head_size": choose((16, 40, 64, 80, 96, 128, 192, 256, 512, 576)),
            "sinks": choose((True, False)),
            "softcap": choose((None, 30.0)),
            "return_lse": choose((True, False)),
            "batch_invariant": choose((False, False, True)),
        }
        found.append(spec.replace(**{name: value for name, value in changes.items() if choose((True, False))}))
    return found


def check_answer(selection: Selection, registry: Registry) -> None:
    """What holds of every answer, whatever the question."""
    backends = registry.catalog.backends
    assert list(selection.classes) == list(selection.spec.row_classes)
    for row_class, decision in selection.classes.items():
        assert {c.name for c in decision.candidates} >= set(backends)
        assert [c.rank for c in decision.candidates if c.rank] == list(range(1, 1 + sum(c.rank is not None for c in decision.candidates)))
        query = Query(selection.spec, selection.device, row_class, selection.lengths)
        for candidate in decision.candidates:
            assert (candidate.status == "rejected") == bool(candidate.reasons)
            assert all(str(reason).strip() and reason.offered and reason.wanted for reason in candidate.reasons)
            covering, _ = backends[candidate.name].judge(query, None)
            assert candidate.status == "rejected" or covering is not None
        assert decision.backend == (decision.ranked[0] if decision.ranked else None)
    assert selection.complete == (set(selection.routes) == set(selection.classes))


@settings(max_examples=DRAWN, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(specs(), st.integers(0, 2**32))
def answer_some(seen: Counter[str], registry: Registry, spec: AttentionSpec, seed: int) -> None:
    choose = random.Random(seed).choice
    for each in relatives(spec, seed):
        device, lengths = choose(DEVICES), choose(("exact", "upper_bound"))
        selection = host.answer(each, device, lengths=lengths)
        check_answer(selection, registry)
        if not selection.complete:
            with pytest.raises(attnmux.NoBackendError) as caught:
                attnmux.select(each, device, lengths=lengths)
            assert caught.value.selection is selection
            assert all(name in str(caught.value) for name in registry.catalog.backends)
        seen["specs"] += 1
        seen[device] += 1
        seen["complete"] += selection.complete
        if seen["specs"] % 20 == 0:
            host._memo.clear()
            again = host.answer(each, device, lengths=lengths)
            assert again == selection
            assert again.explain() == selection.explain()
            assert again.to_dict() == selection.to_dict()


def test_ten_thousand_random_specs(built_ins: Registry) -> None:
    seen: Counter[str] = Counter()
    answer_some(seen, built_ins)
    assert seen["specs"] >= 10_000
    assert min(seen[device] for device in DEVICES) > 300
    assert 0.5 < seen["complete"] / seen["specs"] <= 1


ANY_VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 600),
    st.floats(),
    st.sampled_from((10**400, -(10**400), 2**31, "", "x", (), (4, 1), (0, 0), (1, 2, 3), [4, 1], {}, b"NHD", object, torch.int8, torch.float64)),
    st.sampled_from([value for values in CHOICES.values() for value in values]),
    st.sampled_from([*DTYPES, *DTYPES.values()]),
)
PLAUSIBLE = {"num_q_heads": st.just(8), "num_kv_heads": st.just(2), "head_size": st.just(64), "dtype": st.just(torch.bfloat16)}


@settings(max_examples=800, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.fixed_dictionaries(PLAUSIBLE, optional={name: ANY_VALUE for name in SPEC_FIELD_NAMES if name not in PLAUSIBLE}), st.data())
def test_any_values_make_a_spec_or_a_value_or_type_error(fields: dict[str, Any], data: st.DataObject) -> None:
    spoilt = {**fields, data.draw(st.sampled_from(SPEC_FIELD_NAMES)): data.draw(ANY_VALUE)}
    try:
        spec = AttentionSpec(**spoilt)
    except (ValueError, TypeError) as error:
        said = str(error)
    else:
        said = spec.describe()
        assert spec_from_dict(spec.to_dict()) == spec
    assert any(name in said for name in SPEC_FIELD_NAMES)


@settings(max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_is_selected_on_the_cpu_runs_and_is_right(data: st.DataObject) -> None:
    spec = data.draw(specs().map(lambda spec: spec.replace(head_size=min(spec.head_size, 32), v_head_size=min(spec.v_head_size, 32))))
    case = data.draw(cases(spec, max_rows=3))
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(case.batch)
    assert {name for names in plan.routes.values() for name in names} <= set(attn.selection.backends)
    out, _ = case.outputs()
    attn.run(case.q, case.k_cache, case.v_cache, plan, out=out, **case.layer)
    truth, tokens = oracle(case), case.batch.num_tokens
    if tokens:
        assert float((out[:tokens].double() - truth.out[:tokens]).abs().max()) <= truth.out_allowed
    assert out[tokens:].isnan().all()
