"""Cases hold what they say, where they say it, and NaN everywhere else."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.dispatch.batch_checks import check_batch, page_bounds
from attnmux.dispatch.oracle import reference_attention
from attnmux.dispatch.rows import classify
from attnmux.dispatch.spec import AttentionSpec
from attnmux.testing import Row, make_case, mixed_rows
from attnmux.testing.features import FEATURES
from attnmux.testing.measure import distance, oracle, truth
from attnmux.testing.strategies import cases, specs

SPEC = AttentionSpec(4, 2, 32, torch.float32)
LAYOUTS = [
    {},
    {"kv_layout": "HND"},
    {"page_size": None},
    {"v_head_size": 16},
    {"kv_dtype": torch.float8_e4m3fn, "kv_scale": "head", "kv_layout": "HND"},
    {"q_dtype": torch.float8_e5m2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_dense_is_what_the_call_sees(layout):
    """A softmax over the dense rows equals the oracle over the pool."""
    case = make_case(SPEC.replace(**layout, sinks=True), seed=3)
    want = truth(case)
    for i, row in enumerate(case.rows):
        if not row.q_len:
            continue
        q, k, v = (t.transpose(0, 1) for t in case.dense(i))
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        scores = q @ k.transpose(1, 2) * case.spec.scale
        later = torch.arange(row.kv_len)[None, :] > torch.arange(row.q_len)[:, None] + row.kv_len - row.q_len
        scores = scores.masked_fill(later, -torch.inf)
        sink = case.layer["sinks"].double()[:, None, None].expand(-1, row.q_len, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        assert distance((weights @ v).transpose(0, 1), want[case.tokens(i)]) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_rest_of_the_pool_is_nan(layout):
    case = make_case(SPEC.replace(**layout))
    finite = torch.isfinite(case.k_cache.float()).all(-1).any(-1 if layout.get("kv_layout") != "HND" else 1)
    assert int(finite.sum()) == sum(row.kv_len for row in case.rows)
    before_the_first_page = case.k_cache.as_strided(case.k_cache.shape[1:], case.k_cache.stride()[1:], 0)
    assert bool(torch.isnan(before_the_first_page.float()).all())
    assert bool(torch.isnan(case.q[case.batch.num_tokens :].float()).all())
    assert bool(torch.isnan(case.outputs()[0]).all())


def test_equal_arguments_give_equal_numbers_wherever_the_pages_are():
    low, high, other = make_case(SPEC, place="low"), make_case(SPEC, place="high"), make_case(SPEC, seed=1)
    for row in range(len(low.rows)):
        assert all(torch.equal(a, b) for a, b in zip(low.dense(row), high.dense(row), strict=True))
    assert int(low.batch.block_table.max()) < int(high.batch.block_table[high.batch.block_table >= 0].min())
    assert not torch.equal(low.dense(0)[0], other.dense(0)[0])


@pytest.mark.parametrize("page_size", [8, None])
def test_a_case_may_have_no_rows(page_size):
    case = make_case(SPEC.replace(page_size=page_size), [])
    assert case.batch.num_seqs == case.batch.num_tokens == 0
    assert page_size is None or case.batch.block_table.shape[0] == 0


def test_entries_that_nobody_may_see_are_minus_one():
    case = make_case(SPEC.replace(sliding_window=4), (Row(1, 100),))
    assert (case.batch.block_table[0, :6] == -1).all()
    assert case.batch.block_table[0, 6] >= 0
    assert (case.revealed().batch.block_table[0, :7] >= 0).all()


def test_changed_keys_are_put_back():
    case = make_case(SPEC.replace(kv_dtype=torch.float8_e5m2))
    before = truth(case)
    with case.changed_keys([(0, 3), (1, 0)]):
        inside = truth(case)
    changed = (inside != before).any(-1).any(-1)
    assert bool(changed[case.tokens(0)].any())
    assert not bool(changed[case.tokens(3)].any())
    assert torch.equal(truth(case), before)


def test_a_row_alone_has_the_oracle_of_the_row_in_the_batch():
    for layout in LAYOUTS:
        case = make_case(SPEC.replace(**layout))
        want = truth(case)
        for row in range(len(case.rows)):
            assert torch.equal(truth(case.alone(row)), want[case.tokens(row)])


@pytest.mark.parametrize("feature", [f for f in FEATURES if f.controls], ids=lambda f: f.name)
def test_every_control_changes_the_oracle(feature):
    """Otherwise the case could not tell a backend that ignores the feature from one that has it."""
    case = make_case(SPEC.replace(**feature.on)).revealed()
    want = oracle(case)
    for control in feature.controls:
        assert distance(truth(case.without(**control)), want.out) > 100 * want.out_allowed


def test_rows_cover_every_class_padding_and_emptiness():
    spec = SPEC.replace(mm_prefix="override_window")
    case = make_case(spec)
    classes = classify(spec, case.batch)
    assert {"image", "prefill", "decode", None} == set(classes)
    assert any(row.kv_len == 0 and row.q_len for row in case.rows)
    only = make_case(spec, mixed_rows(spec, ("prefill",)))
    assert set(classify(spec, only.batch)) == {"prefill"}
    assert max(row.kv_len for row in mixed_rows(spec, long=True)) > 1000


def test_sinks_come_in_more_than_one_dtype():
    spec = dataclasses.replace(SPEC, dtype=torch.bfloat16, q_dtype=None, kv_dtype=None, sinks=True)
    assert {make_case(spec, seed=seed).layer["sinks"].dtype for seed in range(2)} == {torch.float32, torch.bfloat16}


@settings(max_examples=60, deadline=None)
@given(specs().flatmap(cases), st.sampled_from(["exact", "upper_bound"]))
def test_random_cases_are_legal_and_the_oracle_answers(case, lengths):
    case = make_case(case.spec, case.rows, lengths=lengths)
    check_batch(case.spec, case.batch, case.q.device, None, True)
    bounds = page_bounds(case.spec, case.batch)
    assert bounds is None or (bounds[0] >= 0 and bounds[1] < case.k_cache.shape[0])
    out, lse = reference_attention(case.q, case.k_cache, case.v_cache, case.spec, case.batch, **case.layer)
    assert bool(torch.isfinite(out).all())
    assert not bool(torch.isnan(lse).any())
