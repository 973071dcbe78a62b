"""Long sequences, and memory beyond what 32 bits count."""

from __future__ import annotations

import pytest
import torch

import attnmux
from attnmux.testing import Row, make_case
from attnmux.testing.measure import SLACK, distance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def close(out: torch.Tensor, lse: torch.Tensor, q, k, v, spec, batch, **layer) -> None:
    n = batch.num_tokens
    want, want_lse = attnmux.reference_attention(q, k, v, spec, batch, compute_dtype=torch.float64, **layer)
    own, own_lse = attnmux.reference_attention(q, k, v, spec, batch, **layer)
    assert distance(out[:n], want[:n]) <= 2 * distance(own[:n], want[:n]) + SLACK
    assert distance(lse[:n], want_lse[:n]) <= 2 * distance(own_lse[:n], want_lse[:n]) + SLACK


def paged(lens: list[tuple[int, int]], page_size: int, pages: list[int]) -> attnmux.Batch:
    ints = {"dtype": torch.int32, "device": "cuda"}
    columns = max(-(-k // page_size) for _, k in lens)
    table = torch.full((len(lens), columns), -1, dtype=torch.int32)
    for row, (_, length) in enumerate(lens):
        for column in range(-(-length // page_size)):
            table[row, column] = pages.pop()
    query_lens = [q for q, _ in lens]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(**ints)
    return attnmux.Batch(
        starts, torch.tensor([k for _, k in lens], **ints), table.cuda(), query_lens_cpu=query_lens, seq_lens_cpu=[k for _, k in lens]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": 4096, "sinks": True}, {"kv_dtype": torch.float8_e4m3fn, "kv_scale": "tensor"}], ids=["plain", "window", "fp8"]
)
def test_long_sequences(dtype, changes):
    spec = attnmux.AttentionSpec(8, 2, 128, dtype, return_lse=True, **changes)
    lens = [(1, 131072), (300, 20000), (16, 65000), (700, 700), (1, 1)]
    torch.manual_seed(0)
    pages = torch.randperm(16384).tolist()
    k, v = (torch.randn(16384, 16, 2, 128, device="cuda", dtype=dtype).to(spec.kv_dtype) for _ in range(2))
    batch = paged(lens, 16, pages)
    q = torch.randn(batch.num_tokens, 8, 128, device="cuda", dtype=dtype)
    layer = {"sinks": torch.randn(8, device="cuda")} if spec.sinks else {"k_scale": 0.5, "v_scale": 2.0} if spec.kv_scale else {}
    attention = attnmux.Attention(spec, "cuda", require="triton")
    out, lse = attention.run(q, k, v, attention.plan(batch), **layer)
    close(out, lse, q, k, v, spec, batch, **layer)


FULL = {
    "plain": {},
    "fp16, head size 80": {"head_size": 80, "dtype": torch.float16},
    "not causal": {"causal": False},
    "page of 64, HND": {"page_size": 64, "kv_layout": "HND"},
    "page of 128": {"page_size": 128},
    "page of 128, window": {"page_size": 128, "sliding_window": 300, "sinks": True},
    "page of 256, spans": {"page_size": 256, "mm_prefix": "override_window"},
    "page of 48": {"page_size": 48},
    "packed": {"page_size": None},
    "group of 1": {"num_kv_heads": 32},
    "group of 3": {"num_q_heads": 24},
    "window": {"sliding_window": 200},
    "chunk": {"chunk": (256, 0)},
    "reference window": {"rswa_window": 64},
    "softcap, alibi": {"softcap": 20.0, "alibi": "linear"},
    "spans": {"mm_prefix": "override_window", "sliding_window": 100},
    "e4m3": {"kv_dtype": torch.float8_e4m3fn, "kv_scale": "head"},
    "e5m2": {"kv_dtype": torch.float8_e5m2, "kv_scale": "tensor"},
}


@pytest.mark.parametrize("name", FULL)
def test_steps_that_fill_the_device(name):
    """They have larger tiles on Hopper, at head size 128."""
    spec = attnmux.AttentionSpec(**{"num_q_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16, "return_lse": True} | FULL[name])
    spans = ((20, 300), (400, 470, 0), (900, 1000, 0))
    rows = (Row(1200, 1500, spans, 600), Row(37, 400, prefix_len=30), Row(3, 700), Row(0, 9), Row(700, 700, spans[:1], 10), Row(1, 1))
    case = make_case(spec, (*rows, *rows) if spec.num_q_heads < 32 else rows, device="cuda")
    attention = attnmux.Attention(spec, "cuda", require="triton")
    plan = attention.plan(case.batch)
    if torch.cuda.get_device_properties(0).multi_processor_count <= 132:
        assert ("long" in plan._parts[0].state.now) == (torch.cuda.get_device_capability() == (9, 0))
    out, lse = attention.run(case.q, case.k_cache, case.v_cache, plan, **case.layer)
    close(out, lse, case.q, case.k_cache, case.v_cache, spec, case.batch, **case.layer)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_pool_beyond_32_bits(layout):
    spec = attnmux.AttentionSpec(8, 8, 128, torch.bfloat16, kv_layout=layout, return_lse=True)
    pages = 2**31 // (16 * 8 * 128) + 64  # elements of the last pages lie beyond 2**31
    shape = (pages, 16, 8, 128) if layout == "NHD" else (pages, 8, 16, 128)
    k, v = (torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.manual_seed(0)
    new = [torch.randn(340, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    attention = attnmux.Attention(spec, "cuda", require="triton")
    last = list(range(pages - 22, pages))
    attention.write_kv(*new, k, v, torch.arange(340, device="cuda") + (pages - 22) * 16)
    batch = paged([(1, 200), (20, 130)], 16, last[::-1])
    q = torch.randn(batch.num_tokens, 8, 128, device="cuda", dtype=torch.bfloat16)
    out, lse = attention.run(q, k, v, attention.plan(batch))
    assert not bool(out.isnan().any())
    close(out, lse, q, k, v, spec, batch)


def test_queries_beyond_32_bits():
    spec = attnmux.AttentionSpec(32, 8, 128, torch.bfloat16, page_size=None, attn_type="encoder_only", return_lse=True)
    rows, length = 4200, 128  # 2**31 elements are 524288 tokens
    starts = (torch.arange(rows + 1, dtype=torch.int32) * length).cuda()
    batch = attnmux.Batch(
        starts,
        torch.full((rows,), length, dtype=torch.int32).cuda(),
        kv_start_loc=starts,
        query_lens_cpu=[length] * rows,
        seq_lens_cpu=[length] * rows,
    )
    tokens = rows * length
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(tokens, 32, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
    k, v = (torch.randn(tokens, 8, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(2))
    attention = attnmux.Attention(spec, "cuda", require="triton")
    out, lse = attention.run(q, k, v, attention.plan(batch))
    tail = slice(tokens - 2 * length, tokens)
    part = batch.take([0, 1])
    close(out[tail], lse[tail], q[tail], k[tail], v[tail], spec, part)
