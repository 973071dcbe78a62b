"""``attnmux bench``."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.dispatch import host
from attnmux.dispatch.attention import Attention
from attnmux.dispatch.cli import UsageError
from attnmux.dispatch.cli.output import add_json, print_json, print_table
from attnmux.dispatch.cli.spec_options import add_spec_arguments, add_steering_arguments, spec_from, steering_from
from attnmux.dispatch.cli.warmup import real_device
from attnmux.dispatch.errors import ConfigError, NoBackendError, PluginError, complaint
from attnmux.dispatch.rows import classify, visible_keys
from attnmux.dispatch.spec import RowClass
from attnmux.testing.cases import Case, make_case
from attnmux.testing.rows import Row

WARM_CALLS = 3
SECONDS = 0.5
"""Repeat a call for about this long."""
L2_BYTES = 256 << 20
_SEQS = re.compile(r"(?:(?P<count>\d+)x)?(?P<q>\d+):(?P<kv>\d+)(?P<spans>(?:@\d+-\d+)*)")


@dataclass(frozen=True, slots=True)
class Timing:
    """Median microseconds of an eager call, and the bytes it must move at the least over that time."""

    backend: str
    microseconds: float
    gb_per_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_spec_arguments(parser)
    add_steering_arguments(parser)
    group = parser.add_argument_group("the batch")
    text = "rows as Q:KV, with NxQ:KV for N of them and @START-END for a multimodal span: 32x1:4096 or 1024:1024@256-512,63x1:2048"
    group.add_argument("--seqs", required=True, metavar="ROWS", help=text)
    group.add_argument("--prefix-len", type=int, default=0, metavar="N", help="prefix of every row, with --rswa-window (default: 0)")
    group.add_argument("--backend", action="append", default=[], metavar="NAME", help="time this one (repeatable; default: all but the reference)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the inputs (default: 0)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    spec, rows, steering = spec_from(args), rows_from(args.seqs, args.prefix_len), steering_from(args)
    device = real_device(args.device)
    selection = host.select(spec, device, **steering)
    try:
        case = make_case(spec, rows, device=selection.device.torch_device, seed=args.seed)
        chosen, picked = _time(case, device, steering)
    except ConfigError:  # a setting, not the rows
        raise
    except ValueError as error:  # rows that the spec does not allow
        raise UsageError(f"--seqs: {error}") from error
    names = args.backend or [name for name in host.registry().catalog.backends if name != "reference"]
    timings, skipped = _time_each(case, device, [name for name in names if name != chosen])
    timings = sorted([picked, *timings], key=lambda timing: timing.microseconds)
    regret = picked.microseconds / timings[0].microseconds - 1
    if args.json:
        found = [{"backend": t.backend, "microseconds": round(t.microseconds, 2), "gb_per_s": round(t.gb_per_s, 2)} for t in timings]
        values = {"device": selection.device.name, "seqs": args.seqs, "spec": spec.to_dict(), "timings": found, "not_timed": skipped}
        print_json("bench", {**values, "selected": chosen, "regret": round(regret, 4)})
        return 0
    print(f"{spec.describe()} on {selection.device.name} ({selection.device.title}), {args.seqs}")
    cells = [(t.backend, f"{t.microseconds:.1f}", f"{t.gb_per_s:.1f}", f"{t.microseconds / timings[0].microseconds:.2f}") for t in timings]
    print_table(("backend", "microseconds", "GB/s", "times the fastest"), cells, right=("microseconds", "GB/s", "times the fastest"))
    print(f"select() picks {chosen}, regret {regret:.1%}")
    for name, why in skipped.items():
        print(f"not timed: {name}: {why}")
    return 0


def rows_from(text: str, prefix_len: int) -> list[Row]:
    """Rows from ``32x1:4096,1024:1024@256-512``; every second row is not causal where the spec asks by sequence.

    Raises:
        UsageError: something else stands there.
    """
    rows: list[Row] = []
    for item in text.split(","):
        found = _SEQS.fullmatch(item.strip())
        if not found:
            raise UsageError(complaint("--seqs", repr(item), "Q:KV or NxQ:KV, with @START-END for spans"))
        spans = tuple(tuple(map(int, span.split("-"))) for span in found["spans"].split("@") if span)
        for _ in range(int(found["count"] or 1)):
            rows.append(Row(int(found["q"]), int(found["kv"]), spans, prefix_len, causal=len(rows) % 2 == 0))
    return rows


def _time_each(case: Case, device: str | None, names: list[str]) -> tuple[list[Timing], dict[str, str]]:
    """Every backend alone, and why some could not be timed."""
    tried = {name: _try(case, device, name) for name in names}
    return [t for t in tried.values() if isinstance(t, Timing)], {name: t for name, t in tried.items() if isinstance(t, str)}


def _try(case: Case, device: str | None, name: str) -> Timing | str:
    classes: list[RowClass] = [c for c in dict.fromkeys(classify(case.spec, case.batch)) if c is not None]
    try:
        return _time(case, device, {"require": dict.fromkeys(classes, name)})[1]
    except NoBackendError as error:
        reasons = [str(r) for c in classes for r in error.selection.classes[c].rejected.get(name, ())]
        return "; ".join(dict.fromkeys(reasons)) or str(error).splitlines()[0]
    except PluginError as error:
        return str(error)


def _time(case: Case, device: str | None, steering: dict[str, Any]) -> tuple[str, Timing]:
    """The route that was taken, and its time."""
    attention = Attention(case.spec, device, **steering)
    plan = attention.plan(case.batch)
    name = "+".join(dict.fromkeys(backend for backends in plan.routes.values() for backend in backends)) or attention.selection.name
    out, _ = case.outputs()

    def call() -> None:
        attention.run(case.q, case.k_cache, case.v_cache, plan, out, **case.layer)

    microseconds = median_microseconds(call, attention.torch_device)
    return name, Timing(name, microseconds, least_bytes(case) / microseconds / 1e3)


def median_microseconds(call: Callable[[], None], device: torch.device) -> float:
    """Median time of a call: events on an accelerator with a cold L2 cache, the clock on a CPU."""
    for _ in range(WARM_CALLS):
        call()
    timed = _clock(call) if device.type == "cpu" else _events(call, device)
    first = timed()
    repeats = min(max(int(SECONDS * 1e6 / max(first, 1.0)), 3), 1000)
    return statistics.median([timed() for _ in range(repeats)])


def _clock(call: Callable[[], None]) -> Callable[[], float]:
    def timed() -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    return timed


def _events(call: Callable[[], None], device: torch.device) -> Callable[[], float]:
    module = torch.get_device_module(device)
    flush = torch.empty(L2_BYTES, dtype=torch.uint8, device=device)

    def timed() -> float:
        flush.zero_()
        start, end = (module.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        module.synchronize(device)
        return float(start.elapsed_time(end)) * 1e3

    return timed


def least_bytes(case: Case) -> int:
    """Bytes of queries, outputs, and of keys and values that somebody may see, each once."""
    spec = case.spec
    keys = sum(_covered(visible_keys(spec, case.batch, i, row.prefix_len)) for i, row in enumerate(case.rows))
    cached = keys * spec.num_kv_heads * (spec.head_size + spec.v_head_size) * spec.kv_dtype.itemsize
    tokens = case.batch.num_tokens * spec.num_q_heads
    return cached + tokens * (spec.head_size * spec.q_dtype.itemsize + spec.v_head_size * spec.dtype.itemsize)


def _covered(ranges: list[tuple[int, int]]) -> int:
    """How many whole numbers lie in at least one of the half-open ranges."""
    total, end = 0, 0
    for lo, hi in sorted(ranges):
        total += max(hi - max(lo, end), 0)
        end = max(end, hi)
    return total
