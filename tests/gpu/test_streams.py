"""Two streams at once: one plan on both, and a plan each, over one workspace."""

from __future__ import annotations

import pytest
import torch

import attnmux
from attnmux.testing import Row, make_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SPEC = attnmux.AttentionSpec(8, 2, 64, torch.float16)
LIMITS = attnmux.Limits(max_num_seqs=8, max_num_tokens=64, max_seq_len=8192, max_query_len=16)


@pytest.mark.parametrize("limits", [LIMITS, None], ids=["limits", "none"])
def test_streams_do_not_share_partial_states(limits):
    attention = attnmux.Attention(SPEC, "cuda", limits=limits, require="triton")
    cases = [make_case(SPEC, (Row(1, 6000), Row(2, 4000), Row(1, 5000 + i)), device="cuda", seed=i) for i in range(2)]
    plans = [attention.plan(case.batch) for case in cases]
    alone = [attention.run(case.q, case.k_cache, case.v_cache, plan).clone() for case, plan in zip(cases, plans, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for stream, (case, plan) in [(s, pair) for pair in zip(cases, plans, strict=True) for s in streams]:
            with torch.cuda.stream(stream):
                found.append(attention.run(case.q, case.k_cache, case.v_cache, plan))
        found += [attention.run(case.q, case.k_cache, case.v_cache, plan) for case, plan in zip(cases, plans, strict=True)]
        torch.cuda.synchronize()
        for out, want in zip(found, [alone[0], alone[0], alone[1], alone[1], *alone], strict=True):
            assert torch.equal(out[:4], want[:4])


def test_a_plan_made_on_a_stream_runs_on_another_without_waiting():
    attention = attnmux.Attention(SPEC, "cuda", limits=LIMITS, require="triton")
    case = make_case(SPEC, (Row(1, 6000), Row(16, 4000)), device="cuda")
    want = attention.run(case.q, case.k_cache, case.v_cache, attention.plan(case.batch)).clone()
    torch.cuda.synchronize()
    busy = torch.randn(4096, 4096, device="cuda")
    side = torch.cuda.Stream()
    plan = None
    for _ in range(20):
        with torch.cuda.stream(side):
            for _ in range(4):
                busy = (busy @ busy).clamp(-1, 1)  # the tables arrive late
            plan = attention.plan(case.batch, into=plan)
        out = attention.run(case.q, case.k_cache, case.v_cache, plan)
        assert torch.equal(out[:17], want[:17])


def test_a_refresh_waits_for_every_stream_that_still_reads():
    attention = attnmux.Attention(SPEC, "cuda", limits=LIMITS, require="triton")
    first, second = (make_case(SPEC, (Row(1, 6000 - 1000 * i), Row(16, 4000)), device="cuda", seed=i) for i in range(2))
    plan = attention.plan(first.batch)
    want = attention.run(first.q, first.k_cache, first.v_cache, plan).clone()
    streams, busy = [torch.cuda.Stream() for _ in range(2)], torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    found = []
    for stream, turns in zip(streams, (20, 0), strict=True):  # the first to be asked is the last to read
        with torch.cuda.stream(stream):
            for _ in range(turns):
                busy = (busy @ busy).clamp(-1, 1)
            found.append(attention.run(first.q, first.k_cache, first.v_cache, plan))
    attention.plan(second.batch, into=plan)
    torch.cuda.synchronize()
    assert all(torch.equal(out[:17], want[:17]) for out in found)
