"""Compositions on a GPU: the answer of one backend, nothing waited for, and one class in a CUDA graph beside eager rows of another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attnmux
from attnmux.testing import Case, Row, make_case
from attnmux.testing.measure import Answer, expect_close, oracle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SPEC = attnmux.AttentionSpec(8, 2, 64, torch.bfloat16, mm_prefix="override_window", return_lse=False)
SPAN = ((40, 300),)
MIXED = (Row(1, 900), Row(300, 300, SPAN), Row(70, 500), Row(0, 40), Row(5, 77), Row(33, 33), Row(40, 90, ((60, 80), (85, 90))), Row(1, 1), Row(2, 0))
SORTED = (*[Row(1, 300 + 7 * i) for i in range(6)], Row(2, 40), Row(250, 700), Row(300, 300, SPAN))
MIXES = {
    "triton + flex": {"image": "triton", "prefill": "flex", "decode": "triton"},
    "triton_flash_attn_3": "triton_flash_attn_3",
    "triton_flash_attn_4": "triton_flash_attn_4",
    "triton_flashinfer": "triton_flashinfer",
    "flashinfer + triton": {"image": "flashinfer", "prefill": "flashinfer", "decode": "triton"},
}


@pytest.fixture(params=MIXES)
def mix(request):
    """A mix of backends that this machine has."""
    wanted = MIXES[request.param]
    try:
        found = attnmux.select(SPEC, device="cuda:0", require=wanted)
    except attnmux.NoBackendError as error:
        pytest.skip(str(error.selection.rejected))
    assert len(found.backends) > 1
    return wanted


def limits_of(case: Case) -> attnmux.Limits:
    query_lens, key_lens = ([getattr(row, name) for row in case.rows] for name in ("q_len", "kv_len"))
    return attnmux.Limits(len(case.rows), case.q.shape[0], max(key_lens) + 100, max(query_lens))


def run(attention: attnmux.Attention, plan: attnmux.Plan, case: Case, out: Tensor | None = None, only: str | None = None) -> Tensor:
    return attention.run(case.q, case.k_cache, case.v_cache, plan, out=case.outputs()[0] if out is None else out, only=only, **case.layer)


@pytest.mark.parametrize("limits", [True, False], ids=["limits", "none"])
@pytest.mark.parametrize("rows", [MIXED, SORTED], ids=["gathered", "views"])
def test_the_answer_is_that_of_one_backend(mix, rows, limits):
    case = make_case(SPEC, rows, device="cuda")
    attention = attnmux.Attention(SPEC, "cuda", require=mix, limits=limits_of(case) if limits else None)
    plan = attention.plan(case.batch)
    assert len({name for names in plan.routes.values() for name in names}) > 1
    composed, want = run(attention, plan, case), oracle(case)
    expect_close(case, Answer(composed, None), want)
    alone = attnmux.Attention(SPEC, "cuda", require="triton")
    single = run(alone, alone.plan(case.batch), case)
    assert float((composed.double() - single.double())[: case.batch.num_tokens].abs().max()) <= 2 * want.out_allowed


def test_nothing_waits_for_the_device(mix, no_synchronisation):
    case = make_case(SPEC, MIXED, device="cuda")
    attention = attnmux.Attention(SPEC, "cuda", require=mix, limits=limits_of(case))
    plan = attention.plan(case.batch)
    run(attention, plan, case)
    with no_synchronisation():
        run(attention, attention.plan(case.batch, into=plan), case)
        run(attention, attention.plan(case.batch), case)


def test_the_last_key_of_a_span_reaches_its_first_token(mix):
    with_span, without = (make_case(SPEC, (Row(300, 300, spans), Row(20, 60)), device="cuda") for spans in (SPAN, ()))
    attention = attnmux.Attention(SPEC, "cuda", require=mix)
    first, last = SPAN[0][0], SPAN[0][1] - 1
    for case, reaches in ((with_span, True), (without, False)):
        plan = attention.plan(case.batch)
        before = run(attention, plan, case)
        with case.changed_keys([(0, last)]):
            after = run(attention, plan, case)
        assert torch.equal(before[first], after[first]) != reaches
        assert torch.equal(before[:first], after[:first])
        assert not torch.equal(before[last], after[last])


def test_decode_rows_in_a_graph_beside_eager_rows_of_other_classes(mix):
    """Captured short; replayed with longer keys, other tables, padding rows and other text and image rows."""
    steps = [
        make_case(SPEC, SORTED, device="cuda", seed=0),
        make_case(SPEC, (*[Row(i % 3 and 1, 1 + 50 * i) for i in range(6)], Row(2, 700), Row(20, 20), Row(90, 300, SPAN)), device="cuda", seed=1),
        make_case(SPEC, (*[Row(1, 799 - i) for i in range(6)], Row(1, 9), Row(250, 250), Row(0, 0)), device="cuda", seed=2),
    ]
    pages, tokens = max(case.k_cache.shape[0] for case in steps), max(case.q.shape[0] for case in steps)
    k, v = (torch.full((pages, *steps[0].k_cache.shape[1:]), torch.nan, dtype=SPEC.dtype, device="cuda") for _ in range(2))
    q = torch.zeros((tokens, SPEC.num_q_heads, SPEC.head_size), dtype=SPEC.dtype, device="cuda")
    out = torch.empty_like(q)
    limits = attnmux.Limits(len(SORTED), tokens, 900, 300)
    attention = attnmux.Attention(SPEC, "cuda", require=mix, limits=limits)
    if attention.selection.graphs["decode"]:
        pytest.skip(f"{attention.selection.graphs['decode']} cannot be captured")

    def fill(case: Case) -> None:
        for pool, cache in ((k, case.k_cache), (v, case.v_cache)):
            pool.fill_(torch.nan)
            pool[: cache.shape[0]].copy_(cache)
        q[: case.q.shape[0]].copy_(case.q)

    def eager(only: str) -> None:
        attention.run(q, k, v, plan, out=out, only=only)

    fill(steps[0])
    plan = attention.plan(steps[0].batch)
    for row_class in SPEC.row_classes:
        eager(row_class)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eager("decode")
    for case in (*steps, *steps[::-1]):
        fill(case)
        attention.plan(case.batch, into=plan)
        out.fill_(torch.nan)
        graph.replay()
        eager("image")
        eager("prefill")
        got, _ = case.outputs()
        got.copy_(out[: got.shape[0]])
        expect_close(case, Answer(got, None), oracle(case))
    moved = make_case(SPEC, (Row(250, 700), *SORTED[:7], SORTED[-1]), device="cuda")
    with pytest.raises(ValueError, match="into is"):
        attention.plan(moved.batch, into=plan)


def test_a_graph_over_gathered_rows_follows_their_tokens():
    case = make_case(SPEC, (Row(1, 60), Row(20, 20), Row(2, 90), Row(30, 60)), device="cuda")
    later = make_case(SPEC, (Row(2, 61), Row(25, 45), Row(1, 91), Row(17, 60)), device="cuda")
    attention = attnmux.Attention(
        SPEC, "cuda", require={"image": "triton", "prefill": "flex", "decode": "triton"}, limits=attnmux.Limits(4, 100, 900, 100)
    )
    plan = attention.plan(case.batch)
    q = torch.zeros((100, SPEC.num_q_heads, SPEC.head_size), dtype=SPEC.dtype, device="cuda")
    k, v = (torch.zeros((40, *case.k_cache.shape[1:]), dtype=SPEC.dtype, device="cuda") for _ in range(2))
    out = torch.empty_like(q)
    attention.run(q, k, v, plan, out=out, only="decode")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, k, v, plan, out=out, only="decode")
    k[: later.k_cache.shape[0]].copy_(later.k_cache)
    v[: later.v_cache.shape[0]].copy_(later.v_cache)
    q[: later.q.shape[0]].copy_(later.q)
    attention.plan(later.batch, into=plan)
    graph.replay()
    attention.run(q, k, v, plan, out=out, only="prefill")
    got, _ = later.outputs()
    got[: later.batch.num_tokens].copy_(out[: later.batch.num_tokens])
    expect_close(later, Answer(got, None), oracle(later))


def test_a_class_is_prepared_before_it_is_captured():
    case = make_case(SPEC, SORTED, device="cuda")
    attention = attnmux.Attention(SPEC, "cuda", require="triton", limits=limits_of(case))
    plan = attention.plan(case.batch)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run it once before capturing"), torch.cuda.graph(graph):
        run(attention, plan, case, only="decode")
