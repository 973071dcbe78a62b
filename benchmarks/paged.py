"""Attention through ``Attention.run`` on a GPU, by CUDA-graph replay: the workloads of docs/performance.md, one backend or all of them.

    python benchmarks/paged.py                                  # what select() picks
    python benchmarks/paged.py --only decode --backends triton auto
    python benchmarks/paged.py --all --table regret.md          # every eligible backend and composition, and what choosing as select() does costs

Each workload has as many pools of keys as it takes for the L2 cache to serve none. The floor is the physical one: each byte once at
``--bandwidth``, or each operation at ``--flops``, whichever is longer (defaults: an H200's data sheet). ``regret`` is the time of what
``select()`` picks over the best time.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import triton

import attnmux
from attnmux.dispatch import host

ROTATED_BYTES = 256e6


@dataclass(frozen=True)
class Workload:
    """Rows as ``(query tokens, keys)``; ``spans`` are those of the first row, half-open; ``images``: the spec allows spans."""

    name: str
    rows: list[tuple[int, int]]
    heads: tuple[int, int] = (32, 8)
    head_size: int = 128
    page_size: int = 16
    layout: str = "NHD"
    window: int | None = None
    sinks: bool = False
    spans: list[tuple[int, int]] = field(default_factory=list)
    images: bool = False
    rswa: tuple[int, int] | None = None  # prefix and window
    kv_dtype: torch.dtype = torch.bfloat16  # another has a scale for each layer

    def spec(self) -> attnmux.AttentionSpec:
        return attnmux.AttentionSpec(
            *self.heads,
            self.head_size,
            torch.bfloat16,
            kv_dtype=self.kv_dtype,
            kv_scale=None if self.kv_dtype == torch.bfloat16 else "tensor",
            page_size=self.page_size,
            kv_layout=self.layout,
            sliding_window=self.window,
            sinks=self.sinks,
            mm_prefix="override_window" if self.spans or self.images else None,
            rswa_window=self.rswa[1] if self.rswa else None,
        )

    def cost(self) -> tuple[float, float]:
        """Bytes moved and floating-point operations, at the least."""
        pairs = keys = 0
        for q_len, kv_len in self.rows:
            most = sum(self.rswa) if self.rswa else self.window or kv_len
            seen = min(kv_len, most + (q_len if self.window else 0))
            keys += seen
            full = q_len * (kv_len - q_len) + q_len * (q_len + 1) // 2
            pairs += min(full, q_len * min(most, kv_len))
        pairs += sum((end - start) * (end - start - 1) // 2 for start, end in self.spans)
        q_heads, kv_heads = self.heads
        tokens = sum(q_len for q_len, _ in self.rows)
        return 2 * self.head_size * (keys * kv_heads * self.kv_dtype.itemsize + 2 * tokens * q_heads), 4 * q_heads * self.head_size * pairs


WIDE = Workload("", [], heads=(16, 8), head_size=256, page_size=64)
NARROW = Workload("", [], heads=(64, 8), head_size=64)
WORKLOADS = [
    *(Workload(f"decode {n} x {keys}", [(1, keys)] * n) for n, keys in ((1, 512), (1, 32768), (1, 131072), (32, 1024), (128, 2048), (8, 32768))),
    *(Workload(f"cliff {n} x 32768", [(1, 32768)] * n) for n in (8, 11, 12, 13, 16, 36)),
    Workload("decode 32 x 4096 HND page 64", [(1, 4096)] * 32, layout="HND", page_size=64),
    Workload("decode skewed", [(1, 40000), *((1, 500 + 61 * i) for i in range(31))]),
    Workload("verify 16 x 6 over 8192", [(6, 8192)] * 16),
    replace(NARROW, name="decode sinks 16 x 16384 D 64", rows=[(1, 16384)] * 16, sinks=True),
    replace(WIDE, name="decode 64 x 4096 D 256", rows=[(1, 4096)] * 64),
    *(
        Workload(f"prefill {n} page {page}", [(n, n)], page_size=page)
        for n, page in ((500, 16), (1024, 16), (2048, 16), (4096, 16), (500, 128), (1024, 128), (4096, 128), (4096, 64), (16384, 16), (16384, 128))
    ),
    Workload("chunk 2048 of 32768", [(2048, 32768)]),
    *(
        Workload(f"{name} fp8", rows, kv_dtype=torch.float8_e4m3fn)
        for name, rows in (("decode 128 x 2048", [(1, 2048)] * 128), ("prefill 4096", [(4096, 4096)]))
    ),
    Workload("mixed 2048 + 63 decodes", [(2048, 2048), *[(1, 2048)] * 63]),
    replace(NARROW, name="prefill 4096 window 128 sinks D 64", rows=[(4096, 4096)], sinks=True, window=128),
    replace(NARROW, name="prefill 4096 D 64", rows=[(4096, 4096)]),
    replace(NARROW, name="prefill 4096 D 64 page 128", rows=[(4096, 4096)], page_size=128),
    replace(WIDE, name="prefill 4096 D 256", rows=[(4096, 4096)]),
    replace(WIDE, name="text 2048 + 62 decodes D 256", rows=[(2048, 2048), *[(1, 4096)] * 62]),
    replace(WIDE, name="text 2048 + 62 decodes D 256, images allowed", rows=[(2048, 2048), *[(1, 4096)] * 62], images=True),
    replace(WIDE, name="image 1024 + text 2048 + 62 decodes D 256", rows=[(1024, 1024), (2048, 2048), *[(1, 4096)] * 62], spans=[(256, 512)]),
    replace(WIDE, name="image spans 4096 D 256", rows=[(4096, 4096)], spans=[(256 + 600 * i, 512 + 600 * i) for i in range(6)]),
    Workload("R-SWA decode 64 x 6000", [(1, 6000)] * 64, rswa=(1000, 128)),
    Workload("R-SWA decode 64 x 6000 MHA", [(1, 6000)] * 64, heads=(10, 10), rswa=(1000, 128)),
]


def layer(work: Workload, backend: str, seed: int) -> Callable[[], object]:
    """One call over a pool of its own, its pages in random order."""
    spec, generator = work.spec(), torch.Generator("cuda").manual_seed(seed)
    pages = [math.ceil(keys / work.page_size) for _, keys in work.rows]
    place = (work.page_size, spec.num_kv_heads) if work.layout == "NHD" else (spec.num_kv_heads, work.page_size)
    like = {"device": "cuda", "dtype": spec.dtype, "generator": generator}
    k, v = (torch.randn(sum(pages), *place, spec.head_size, **like).to(spec.kv_dtype) for _ in range(2))
    query_lens, key_lens = ([row[i] for row in work.rows] for i in range(2))
    q = torch.randn(sum(query_lens), spec.num_q_heads, spec.head_size, **like)
    order = torch.randperm(sum(pages), device="cuda", generator=generator).int()
    table = torch.nn.utils.rnn.pad_sequence(list(order.split(pages)), batch_first=True)
    ints = {"dtype": torch.int32, "device": "cuda"}
    batch = attnmux.Batch(
        torch.tensor([0, *query_lens]).cumsum(0).to(**ints),
        torch.tensor(key_lens, **ints),
        table.contiguous(),
        query_lens_cpu=query_lens,
        seq_lens_cpu=key_lens,
        mm_spans=[work.spans, *[[]] * (len(work.rows) - 1)] if work.spans else None,
        prefix_lens=torch.full((len(work.rows),), work.rswa[0], **ints) if work.rswa else None,
    )
    limits = attnmux.Limits(len(work.rows), sum(query_lens), max(key_lens), max(query_lens))
    attention = attnmux.Attention(spec, "cuda", limits=limits, require=None if backend == "auto" else backend)
    plan, out = attention.plan(batch), torch.empty_like(q)
    sinks = torch.randn(spec.num_q_heads, device="cuda", dtype=spec.dtype) if spec.sinks else None  # as models keep them
    scales = {} if spec.kv_scale is None else {"k_scale": torch.ones((), device="cuda"), "v_scale": torch.ones((), device="cuda")}
    return lambda: attention.run(q, k, v, plan, out=out, sinks=sinks, **scales)


def candidates(work: Workload) -> list[str]:
    """Every backend and registered composition that can run the workload's spec here, then ``auto``."""
    found, catalog = [], host.registry().catalog
    for name in (*catalog.backends, *catalog.compositions):
        if name not in ("reference", "sdpa"):
            with contextlib.suppress(attnmux.NoBackendError):
                attnmux.select(work.spec(), device="cuda:0", require=name)
                found.append(name)
    return [*found, "auto"]


def microseconds(work: Workload, backend: str, pools: int) -> float:
    """Median time of one call."""
    calls = [layer(work, backend, i) for i in range(pools)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    took: float = triton.testing.do_bench_cudagraph(lambda: [call() for call in calls], rep=40, return_mode="median")
    return took * 1e3 / pools


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="workloads with one of these in their names")
    parser.add_argument("--backends", nargs="*", default=["auto"], help="names of backends or compositions, or auto")
    parser.add_argument("--all", action="store_true", help="every backend and composition that can")
    parser.add_argument("--table", metavar="PATH", type=Path, help="write the result as Markdown")
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes a second")
    parser.add_argument("--flops", type=float, default=990e12, help="operations a second")
    args = parser.parse_args()
    wanted = [work for work in WORKLOADS if any(part in work.name for part in args.only)]
    if not wanted:
        parser.error(f"--only {' '.join(args.only)} is in no name; known: {', '.join(work.name for work in WORKLOADS)}")
    known = {"auto", *host.registry().catalog.names()}
    if unknown := set(args.backends) - known:
        parser.error(f"--backends {' '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}; microseconds")
    rows: list[tuple[str, float, dict[str, float], str]] = []
    for work in wanted:
        moved, computed = (cost / rate * 1e6 for cost, rate in zip(work.cost(), (args.bandwidth, args.flops), strict=True))
        pools = max(1, min(24, math.ceil(ROTATED_BYTES / work.cost()[0]))) if moved > computed else 1
        times: dict[str, float] = {}
        for backend in candidates(work) if args.all else args.backends:
            try:
                times[backend] = microseconds(work, backend, pools)
            except Exception as error:  # the others are wanted all the same
                print(f"{work.name}, {backend}: {type(error).__name__}: {str(error)[:300]}")
            torch.cuda.empty_cache()
        picked = attnmux.select(work.spec(), device="cuda:0").name
        rows.append((work.name, max(moved, computed), times, picked))
        print(
            f"{work.name:36} floor {rows[-1][1]:8.1f}   " + "  ".join(f"{name} {took:.1f}" for name, took in times.items()) + f"   {_regret(times)}",
            flush=True,
        )
    if args.table:
        args.table.write_text(_table(rows))


def _regret(times: dict[str, float]) -> str:
    return f"{times['auto'] / min(times.values()):.3f}" if "auto" in times and len(times) > 1 else ""


def _table(rows: list[tuple[str, float, dict[str, float], str]]) -> str:
    names = list(dict.fromkeys(name for _, _, times, _ in rows for name in times if name != "auto"))
    lines = ["| workload | floor | " + " | ".join(names) + " | picked | its time | regret |", "|---" * (len(names) + 5) + "|"]
    for workload, floor, times, picked in rows:
        cells = [f"{times[name]:.1f}" if name in times else "-" for name in names]
        lines.append(f"| {workload} | {floor:.1f} | " + " | ".join(cells) + f" | {picked} | {times.get('auto', math.nan):.1f} | {_regret(times)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
