"""Host time of the Triton backend on a GPU: ``plan`` of a batch, and eager ``run`` and ``write_kv`` whose kernels are compiled.

    python benchmarks/triton_host.py

Nothing is waited for inside the loops, so that the numbers are the host's own work; medians of several loops.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import attnmux

LOOPS, CALLS = 9, 100


def microseconds(call: Callable[[], object]) -> float:
    """Median host time of a call."""
    found = []
    for _ in range(LOOPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
        torch.cuda.synchronize()
    return statistics.median(found)


def measure(query_lens: list[int], keys: int) -> tuple[float, float, float, float]:
    """``(a new plan, a plan into an old one, run, write_kv)`` for rows of so many query tokens and ``keys`` keys."""
    spec = attnmux.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    seqs, tokens = len(query_lens), sum(query_lens)
    limits = attnmux.Limits(max_num_seqs=seqs, max_num_tokens=tokens, max_seq_len=keys, max_query_len=max(query_lens))
    attention = attnmux.Attention(spec, "cuda", limits=limits, require="triton")
    attention.warmup()
    pages = -(-keys // 16)
    k, v = (torch.zeros(seqs * pages, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = torch.zeros(tokens, 32, 128, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    ints = {"dtype": torch.int32, "device": "cuda"}
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(**ints)
    lens, table = torch.full((seqs,), keys, **ints), torch.arange(seqs * pages, **ints).view(seqs, pages)

    def batch() -> attnmux.Batch:
        return attnmux.Batch(starts, lens, table, query_lens_cpu=query_lens, seq_lens_cpu=[keys] * seqs)

    plan = attention.plan(batch())
    new, into = microseconds(lambda: attention.plan(batch())), microseconds(lambda: attention.plan(batch(), into=plan))
    new_keys = torch.zeros(tokens, 8, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(tokens, device="cuda")
    write = microseconds(lambda: attention.write_kv(new_keys, new_keys, k, v, slots))
    return new, into, microseconds(lambda: attention.run(q, k, v, plan, out=out)), write


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds")
    for name, query_lens, keys in (
        ("decode, 64 rows", [1] * 64, 512),
        ("prefill, 1 row of 64", [64], 64),
        ("mixed, 1 + 63 rows", [64] + [1] * 63, 512),
    ):
        new, into, run, write = measure(query_lens, keys)
        print(f"{name:22} new plan {new:6.1f}   plan into {into:6.1f}   run {run:6.1f}   write_kv {write:6.1f}")


if __name__ == "__main__":
    main()
