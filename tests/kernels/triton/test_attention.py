"""Whole kernels over the feature grid: every pair of values of every two dimensions, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest
import torch

from attnmux.dispatch import host
from attnmux.dispatch.device import Device
from attnmux.dispatch.spec import AttentionSpec
from attnmux.testing import Row, make_case
from attnmux.testing.features import FEATURES
from attnmux.testing.measure import distance, expect_close, oracle, truth

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GRID: dict[str, dict[str, dict[str, Any]]] = {
    "mask": {
        "causal": {},
        "window": {"sliding_window": 7},
        "window_right": {"sliding_window": 6, "window_right": 2, "causal": False},
        "chunk": {"chunk": (8, 1)},
        "not_causal": {"causal": False},
        "per_sequence": {"causal": "per_sequence", "sliding_window": 9},
        "encoder": {"attn_type": "encoder_only", "sliding_window": 5},
        "cross": {"attn_type": "cross"},
        "override": {"mm_prefix": "override_window", "sliding_window": 5},
        "within": {"mm_prefix": "within_window", "sliding_window": 9},
        "within_chunk": {"mm_prefix": "within_window", "chunk": (6, 0)},
        "rswa": {"rswa_window": 5},
    },
    "score": {
        "plain": {},
        "softcap": {"softcap": 2.0, "scale": 0.3},
        "alibi": {"alibi": "linear"},
        "alibi_sqrt": {"alibi": "sqrt"},
        "sinks": {"sinks": True},
        "all": {"softcap": 5.0, "alibi": "linear", "sinks": True},
    },
    "pages": {
        "16": {"page_size": 16},
        "1": {"page_size": 1},
        "3": {"page_size": 3},
        "48hnd": {"page_size": 48, "kv_layout": "HND"},
        "8hnd": {"page_size": 8, "kv_layout": "HND"},
        "1056": {"page_size": 1056},
        "64": {"page_size": 64},
        "128hnd": {"page_size": 128, "kv_layout": "HND"},
        "packed": {"page_size": None},
    },
    "cache": {
        "same": {},
        "e4m3fn": {"kv_dtype": torch.float8_e4m3fn, "kv_scale": "tensor"},
        "e5m2": {"kv_dtype": torch.float8_e5m2, "kv_scale": "head"},
        "e4m3fnuz": {"kv_dtype": torch.float8_e4m3fnuz, "kv_scale": "head"},
        "e5m2fnuz": {"kv_dtype": torch.float8_e5m2fnuz},
    },
    "heads": {
        str(q // kv): {"num_q_heads": q, "num_kv_heads": kv} for q, kv in ((6, 2), (3, 3), (7, 1), (8, 1), (16, 1), (71, 1))
    },
    "sizes": {
        **{str(size): {"head_size": size} for size in ((16, 40, 72, 256, 512) if INTERPRETED else (16, 40, 64, 72, 128, 256, 512))},
        "192-128": {"head_size": 192, "v_head_size": 128},
    },
    "dtype": {"fp16": {"dtype": torch.float16}, "fp32": {"dtype": torch.float32}} | ({} if INTERPRETED else {"bf16": {"dtype": torch.bfloat16}}),
    "more": {
        "": {},
        "lse": {"return_lse": True},
        "invariant": {"batch_invariant": True, "return_lse": True},
        "bounds": {"lengths": "upper_bound"},
        "q_e4m3fn": {"q_dtype": torch.float8_e4m3fn},
        "q_e5m2fnuz": {"q_dtype": torch.float8_e5m2fnuz},
    },
}  # fmt: skip
Choice = dict[str, str]


def spec_of(choice: Choice) -> tuple[AttentionSpec, str] | None:
    """The spec and the kind of lengths of a choice, or ``None`` where it has no meaning."""
    fields: dict[str, Any] = {"num_q_heads": 6, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float16}
    for dimension, value in choice.items():
        fields |= GRID[dimension][value]
    lengths = fields.pop("lengths", "exact")
    try:
        return AttentionSpec(**fields), lengths
    except ValueError:
        return None


def all_pairs() -> Iterator[Choice]:
    """A small set of choices that holds every meaningful pair of values of two dimensions."""

    def pairs_in(choice: Choice) -> set[tuple[tuple[str, str], ...]]:
        return set(combinations(((d, choice[d]) for d in GRID if d in choice), 2))

    missing = {pair: None for a, b in combinations(GRID, 2) for va in GRID[a] for vb in GRID[b] if spec_of(dict(pair := ((a, va), (b, vb))))}
    while missing:
        choice = dict(next(iter(missing)))
        for dimension, values in GRID.items():
            if dimension not in choice:
                meaningful = [value for value in values if spec_of({**choice, dimension: value})]
                choice[dimension] = max(meaningful, key=lambda v: len(pairs_in({**choice, dimension: v}) & missing.keys()))
        yield choice
        for pair in pairs_in(choice):
            missing.pop(pair, None)


def rows_of(spec: AttentionSpec) -> tuple[Row, ...]:
    """Few and short ragged rows that cross tiles: the interpreter's here are 16 keys, a GPU's up to 64."""
    if spec.attn_type == "encoder_only":
        rows = [Row(19, 19), Row(0, 5), Row(1, 1), Row(3, 0)]
    elif spec.attn_type == "cross":
        rows = [Row(1, 37), Row(6, 4), Row(0, 4), Row(18, 20), Row(3, 0)]
    else:
        rows = [Row(1, 45), Row(3, 18, prefix_len=50, causal=False), Row(0, 5), Row(2, 0), Row(17, 33, prefix_len=4)]
    if spec.mm_prefix:
        rows += [Row(18, 27, ((2, 7), (8, 24), (27, 31))), Row(1, 20, ((14, 20),)), Row(17, 18, ((1, 4, 0), (6, 9, 0), (11, 15, 1)), causal=False)]
    return tuple(rows) if INTERPRETED else tuple(stretched(row) for row in rows)


def stretched(row: Row) -> Row:
    """The same row with five times the keys and three times the prefill tokens."""
    q_len = row.q_len if row.q_len <= 16 and row.q_len < row.kv_len else 5 * row.q_len if row.q_len == row.kv_len else 3 * row.q_len
    spans = tuple((5 * s[0], 5 * s[1], *s[2:]) for s in row.spans)
    return dataclasses.replace(row, q_len=q_len, kv_len=5 * row.kv_len, spans=spans, prefix_len=5 * row.prefix_len)


CHOICES = list(all_pairs())


def test_the_grid_holds_every_pair():
    for a, b in combinations(GRID, 2):
        for va, vb in ((va, vb) for va in GRID[a] for vb in GRID[b] if spec_of({a: va, b: vb})):
            assert any(c[a] == va and c[b] == vb for c in CHOICES), (a, va, b, vb)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join(filter(None, c.values())))
def test_equals_the_oracle(choice: Choice, machine: Device, device: torch.device, attend: Callable[..., Any], cpu: Callable[..., Any]) -> None:
    found = spec_of(choice)
    assert found is not None
    spec, lengths = found
    answer = host.answer(spec, machine, require="triton", lengths=lengths)
    if not answer.complete and not INTERPRETED:  # a group of 71 heads of 512 elements: no tile of it fits, and selection says so
        assert all(reason.field == "head_size" and "bytes" in reason.wanted for reason in answer.rejected["triton"]), answer.rejected["triton"]
        return
    case = make_case(spec, rows_of(spec), device=device, seed=len(str(choice)), lengths=lengths)
    expect_close(case, attend(case, programs=8 if INTERPRETED else 64), oracle(cpu(case)))


@pytest.mark.parametrize("feature", [f for f in FEATURES if f.controls], ids=lambda feature: feature.name)
def test_the_answer_is_not_the_one_without_the_feature(feature, device, attend, cpu):
    spec = AttentionSpec(4, 2, 64, torch.float32).replace(**feature.on)
    case = make_case(spec, rows_of(spec), device=device)
    answer, want = attend(case), oracle(cpu(case))
    expect_close(case, answer, want)
    for control in feature.controls:
        assert distance(answer.out[: case.batch.num_tokens], truth(cpu(case.without(**control)))) > 4 * want.out_allowed, control
