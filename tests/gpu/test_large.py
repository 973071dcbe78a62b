"""Long sequences, and memory beyond what 32 bits count."""

from __future__ import annotations

import pytest
import torch

import attnmux
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
