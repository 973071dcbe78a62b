"""The CPU route over pages in random order, against torch's SDPA over contiguous keys of the same rows.

    python benchmarks/cpu_sdpa.py [--json results.json]

The two take turns, and medians are compared. Prefill is causal with as many new tokens as keys; decode is one token a row.
Run it on an idle machine. On a busy one set ``OMP_WAIT_POLICY=passive``: OpenMP's threads otherwise spin while they wait for
one that is not running, and the paged route, with more parallel regions than one call of SDPA, is measured for little else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import attnmux

HEADS = ((32, 8, 128), (16, 16, 64))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LIMITS = {"prefill": 1.3, "decode": 2.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--keys", type=int, default=2048)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--layout", choices=("NHD", "HND"), default="NHD")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--phases", nargs="+", choices=tuple(LIMITS), default=list(LIMITS))
    parser.add_argument("--repeat", type=int, help="pairs of runs; default 3 for prefill and 25 for decode")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {args.threads} threads, {args.rows} rows of {args.keys} keys, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'phase':8} {'heads':7} {'D':>4} {'dtype':6} {'torch ms':>9} {'attnmux ms':>10} {'ratio':>6} {'goal':>5} {'plan ms':>8}  route")
    results = []
    for phase in args.phases:
        for num_q_heads, num_kv_heads, head_size in HEADS:
            for dtype in args.dtypes:
                result = measure(args, phase, num_q_heads, num_kv_heads, head_size, dtype)
                results.append(result)
                print(
                    f"{phase:8} {num_q_heads}/{num_kv_heads:<4} {head_size:4} {dtype:6} {result['torch_ms']:9.2f} {result['attnmux_ms']:10.2f} "
                    f"{result['ratio']:6.2f} {LIMITS[phase]:5.1f} {result['plan_ms']:8.2f}  {result['route']}"
                )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"torch": torch.__version__, "threads": args.threads, "results": results}, file, indent=2)


def measure(args: argparse.Namespace, phase: str, num_q_heads: int, num_kv_heads: int, head_size: int, dtype: str) -> dict[str, Any]:
    """Median times of one configuration, after checking that both compute the same."""
    rows, kv_len = args.rows, args.keys
    q_len = kv_len if phase == "prefill" else 1
    spec = attnmux.AttentionSpec(num_q_heads, num_kv_heads, head_size, DTYPES[dtype], page_size=args.page_size, kv_layout=args.layout)
    torch.manual_seed(0)
    q = torch.randn(rows * q_len, num_q_heads, head_size).to(spec.dtype)
    keys, values = (torch.randn(rows, num_kv_heads, kv_len, head_size).to(spec.dtype) for _ in range(2))
    attention = attnmux.Attention(spec, "cpu")
    batch, pools = paged(spec, q_len, keys, values)
    dense_q = q.view(rows, q_len, num_q_heads, head_size).transpose(1, 2).contiguous()
    plan = attention.plan(batch)
    out = torch.empty_like(q)

    def ours() -> Any:
        return attention.run(q, *pools, plan, out=out)

    def theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(dense_q, keys, values, is_causal=q_len > 1, enable_gqa=num_q_heads != num_kv_heads)

    error = (ours().view(rows, q_len, num_q_heads, head_size).transpose(1, 2).float() - theirs().float()).abs().max().item()
    if error > (1e-4 if dtype == "fp32" else 5e-2):
        raise SystemExit(f"{phase} {dtype}: the two differ by {error}")
    repeat = args.repeat or (3 if phase == "prefill" else 25)
    pairs = [(timed(theirs), timed(ours)) for _ in range(repeat)]
    torch_ms, attnmux_ms = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "phase": phase,
        "heads": f"{num_q_heads}/{num_kv_heads}",
        "head_size": head_size,
        "dtype": dtype,
        "torch_ms": torch_ms,
        "attnmux_ms": attnmux_ms,
        "ratio": attnmux_ms / torch_ms,
        "plan_ms": statistics.median(timed(lambda: attention.plan(batch)) for _ in range(5)),
        "route": attention.selection.name,
    }


def paged(spec: attnmux.AttentionSpec, q_len: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[attnmux.Batch, list[torch.Tensor]]:
    """The rows ``[rows, Hkv, kv_len, D]`` as a batch over pages in random order."""
    rows, heads, kv_len, size = keys.shape
    page_size = spec.page_size or 1
    columns = -(-kv_len // page_size)
    table = torch.randperm(rows * columns).view(rows, columns)
    pools = []
    for tensor in (keys, values):
        padded = F.pad(tensor, (0, 0, 0, columns * page_size - kv_len)).view(rows, heads, columns, page_size, size)
        pool = torch.empty(rows * columns, page_size, heads, size, dtype=spec.dtype)
        pool[table.flatten()] = padded.permute(0, 2, 3, 1, 4).flatten(0, 1)
        pools.append(pool if spec.kv_layout == "NHD" else pool.transpose(1, 2).contiguous())
    batch = attnmux.Batch(
        (torch.arange(rows + 1) * q_len).int(),
        torch.full((rows,), kv_len, dtype=torch.int32),
        table.int(),
        query_lens_cpu=[q_len] * rows,
        seq_lens_cpu=[kv_len] * rows,
    )
    return batch, pools


def timed(function: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
