"""The oracle against scalar loops over the definitions, in float64, that share no code with it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attnmux.dispatch.oracle import reference_attention
from attnmux.dispatch.spec import FP8_DTYPES, AttentionSpec
from attnmux.kernels import reference
from attnmux.testing import Case, Row, make_case

BASE = AttentionSpec(4, 2, 8, torch.float32, page_size=4)
ROWS = (
    Row(3, 13, prefix_len=5),
    Row(0, 6),
    Row(9, 14, spans=((2, 4), (6, 11)), prefix_len=2, causal=False),
    Row(2, 0),
    Row(12, 12, spans=((1, 4, 0), (6, 8, 1), (9, 12, 0)), prefix_len=30),
    Row(1, 9, spans=((20, 25),), causal=False),
)


def sees(spec: AttentionSpec, row: Row, q: int, k: int) -> bool:
    """Whether the token at position ``q`` sees key ``k``, written out from the definitions."""
    d = q - k
    if spec.attn_type == "cross":
        return True
    if spec.rswa_window is not None:
        return k <= q and (k < row.prefix_len or d < spec.rswa_window)
    causal = row.causal if spec.causal == "per_sequence" else spec.causal
    right_limit = spec.sliding_window - 1 if spec.window_right is None and spec.sliding_window is not None else spec.window_right
    ahead = d >= 0 if causal else (right_limit is None or -d <= right_limit)
    recent = spec.sliding_window is None or d < spec.sliding_window
    if spec.chunk is not None:
        recent = recent and q // spec.chunk[0] - k // spec.chunk[0] <= spec.chunk[1]
    together = False
    if spec.mm_prefix is not None:
        homes_q = [i for i, span in enumerate(row.spans) if span[0] <= q < span[1]]
        homes_k = [i for i, span in enumerate(row.spans) if span[0] <= k < span[1]]
        for i in homes_q:
            for j in homes_k:
                grouped = len(row.spans[i]) == 3 and len(row.spans[j]) == 3 and row.spans[i][2] == row.spans[j][2]
                together = together or i == j or grouped
    if spec.mm_prefix == "within_window":
        return (ahead or together) and recent
    return (ahead and recent) or together


def loops(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention one number at a time."""
    spec, args = case.spec, case.layer_args
    out = torch.zeros(case.batch.num_tokens, spec.num_q_heads, spec.v_head_size, dtype=torch.float64)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64)
    for r, row in enumerate(case.rows):
        queries, keys, values = (t.tolist() for t in case.dense(r))
        for i in range(row.q_len):
            position = row.kv_len - row.q_len + i
            visible = [k for k in range(row.kv_len) if sees(spec, row, position, k)]
            for h in range(spec.num_q_heads):
                scores = []
                for k in visible:
                    score = spec.scale * sum(a * b for a, b in zip(queries[i][h], keys[k][h // spec.group], strict=True))
                    if spec.softcap is not None:
                        score = spec.softcap * math.tanh(score / spec.softcap)
                    if spec.alibi == "linear":
                        score -= float(args.alibi_slopes[h]) * abs(position - k)
                    if spec.alibi == "sqrt" and k <= position:
                        score -= float(args.alibi_slopes[h]) * math.sqrt(position - k)
                    scores.append(score)
                total = sum(math.exp(score) for score in scores) + (math.exp(float(args.sinks[h])) if spec.sinks else 0.0)
                token = case.tokens(r).start + i
                lse[token, h] = math.log(total) if total else -math.inf
                for k, score in zip(visible, scores, strict=True):
                    for d in range(spec.v_head_size):
                        out[token, h, d] += math.exp(score) / total * values[k][h // spec.group][d]
    return out, lse


def answer(case: Case, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = reference_attention(case.q, case.k_cache, case.v_cache, case.spec, case.batch, compute_dtype=dtype, **case.layer)
    return out[: case.batch.num_tokens], lse[: case.batch.num_tokens]


def close(got: torch.Tensor, want: torch.Tensor, allowed: float) -> bool:
    gap = torch.where(got == want, 0.0, (got.double() - want.double()).abs())
    return bool((gap <= allowed).all())  # NaN is not


WINDOW = {"sliding_window": 4}
SCALED = {"kv_dtype": torch.float8_e4m3fn, "kv_scale": "head"}
FEATURES = {
    "window": (WINDOW, {"sliding_window": None}),
    "window by one": (WINDOW, {"sliding_window": 5}),
    "window both ways": ({**WINDOW, "causal": False}, {"sliding_window": None}),
    "window_right": ({**WINDOW, "causal": False, "window_right": 1}, {"window_right": None}),
    "chunk": ({"chunk": (4, 0)}, {"chunk": None}),
    "chunk lookback": ({"chunk": (4, 1)}, {"chunk": (4, 0)}),
    "chunk not causal": ({"chunk": (4, 1), "causal": False}, {"chunk": None}),
    "not causal": ({"causal": False}, {"causal": True}),
    "per sequence": ({"causal": "per_sequence"}, {"causal": True}),
    "per sequence window": ({"causal": "per_sequence", **WINDOW}, {"causal": False}),
    "encoder": ({"attn_type": "encoder_only"}, {"attn_type": "decoder", "causal": True}),
    "encoder window": ({"attn_type": "encoder_only", **WINDOW}, {"sliding_window": None}),
    "cross": ({"attn_type": "cross"}, {"attn_type": "decoder", "causal": True}),
    "spans": ({"mm_prefix": "override_window"}, {"mm_prefix": None}),
    "spans override": ({"mm_prefix": "override_window", **WINDOW}, {"mm_prefix": "within_window"}),
    "spans within": ({"mm_prefix": "within_window", **WINDOW}, {"mm_prefix": None}),
    "spans and chunks": ({"mm_prefix": "within_window", "chunk": (4, 0)}, {"mm_prefix": "override_window"}),
    "rswa prefix": ({"rswa_window": 3}, {"rswa_window": None, "sliding_window": 3}),
    "rswa window": ({"rswa_window": 3}, {"rswa_window": None}),
    "scale": ({"scale": -0.9}, {"scale": None}),
    "softcap": ({"softcap": 1.5}, {"softcap": None}),
    "alibi linear": ({"alibi": "linear"}, {"alibi": None}),
    "alibi both ways": ({"alibi": "linear", "causal": False}, {"alibi": "sqrt"}),
    "alibi sqrt": ({"alibi": "sqrt", "causal": False}, {"alibi": None}),
    "sinks": ({"sinks": True}, {"sinks": False}),
    "scale by head": (SCALED, {"kv_scale": "tensor"}),
    "scale by tensor": ({**SCALED, "kv_scale": "tensor"}, {"kv_scale": None}),
    "e5m2 bytes": ({"kv_dtype": torch.float8_e5m2}, {"kv_dtype": torch.float8_e4m3fn}),
    "fnuz bytes": ({"kv_dtype": torch.float8_e4m3fnuz}, {"kv_dtype": torch.float8_e4m3fn}),
}
ALL = {"softcap": 2.0, "alibi": "linear", "sinks": True, "mm_prefix": "within_window", "sliding_window": 5, "chunk": (8, 1), "v_head_size": 6}
SHAPES = {
    "plain": {},
    "hnd": {"kv_layout": "HND"},
    "packed": {"page_size": None},
    "page of one": {"page_size": 1},
    "odd page": {"page_size": 5},
    "multi-head": {"num_kv_heads": 4},
    "multi-query": {"num_kv_heads": 1},
    "wide values": {"v_head_size": 11},
    "odd head": {"head_size": 3},
    "all": ALL,
    "all hnd": {**ALL, "kv_layout": "HND"},
    "all packed": {**ALL, "page_size": None},
    **{f"kv {str(dtype)[6:]}": {"kv_dtype": dtype, "kv_scale": "head"} for dtype in FP8_DTYPES},
    **{f"q {str(dtype)[6:]}": {"q_dtype": dtype} for dtype in FP8_DTYPES},
}


def rows_of(spec: AttentionSpec) -> tuple[Row, ...]:
    if spec.attn_type == "encoder_only":
        return tuple(replace(row, q_len=row.kv_len if row.q_len else 0) for row in ROWS)
    return (*ROWS, Row(7, 4)) if spec.attn_type == "cross" else ROWS  # only there a row may have fewer keys than tokens


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_against_loops_and_without_it(name):
    on, off = FEATURES[name]
    spec = BASE.replace(**on)
    case = make_case(spec, rows_of(spec)[: None if spec.attn_type == "cross" else 6])
    want_out, want_lse = loops(case)
    out, lse = answer(case)
    assert close(out, want_out, 1e-12) and close(lse, want_lse, 1e-12)
    rows = tuple(row for row in case.rows if row.q_len <= row.kv_len)
    control = make_case(spec, rows).without(**off)
    assert not close(answer(control)[0], answer(make_case(spec, rows))[0], 0.01), "the case cannot tell the feature from its absence"


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_against_loops(name):
    case = make_case(BASE.replace(**SHAPES[name]), ROWS)
    want_out, want_lse = loops(case)
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        out, lse = answer(case, dtype)
        rounded = case.spec.dtype if dtype == torch.float32 else dtype
        assert out.dtype == rounded
        assert close(out, want_out, allowed) and close(lse, want_lse, allowed)


def test_upper_bound_lengths_do_not_count():
    spec = BASE.replace(sliding_window=5, page_size=4)
    want = answer(make_case(spec, ROWS))
    got = answer(make_case(spec, ROWS, lengths="upper_bound"))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_rows_that_see_nothing_and_tokens_beyond_the_batch():
    for sinks in (False, True):
        spec = BASE.replace(sinks=sinks, return_lse=True)
        case = make_case(spec, (Row(2, 0), Row(0, 9), Row(1, 5)))
        out, lse = case.outputs()
        lengths = {"query_lens": [2, 0, 1], "seq_lens": [0, 9, 5]}
        reference.reference_attention(
            case.q,
            case.k_cache,
            case.v_cache,
            **lengths,
            block_table=case.batch.block_table,
            scale=1.0,
            sinks=case.layer_args.sinks,
            out=out,
            lse=lse,
        )
        assert torch.equal(out[:2], torch.zeros_like(out[:2]))
        assert torch.equal(lse[:2], (case.layer["sinks"].float() if sinks else torch.tensor(-torch.inf)).expand(2, 4))
        assert torch.isfinite(out[2]).all() and torch.isnan(out[3:]).all() and torch.isnan(lse[3:]).all()


def test_entries_that_nobody_sees_are_not_followed():
    spec = BASE.replace(rswa_window=3)
    rows = (Row(2, 40, prefix_len=5), Row(0, 9))
    case = make_case(spec, rows)
    table = case.batch.block_table
    assert table[0].tolist().count(-1) >= 7  # the gap between prefix and window, and the end
    want = answer(case)
    table[table == -1] = 10**6
    got = reference.reference_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        query_lens=[2, 0],
        seq_lens=[40, 9],
        block_table=table,
        scale=spec.scale,
        sight=reference.Sight(rswa_window=3),
        prefix_lens=[5, 0],
        compute_dtype=torch.float64,
    )
    assert torch.equal(got[0][:2], want[0]) and torch.equal(got[1][:2], want[1])


def test_a_row_cut_into_blocks_is_the_same_row(monkeypatch):
    case = make_case(BASE.replace(**ALL), ROWS)
    whole = answer(case)
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 14 * 3)  # three tokens of a row of 14 keys
    assert all(close(a, b, 1e-12) for a, b in zip(answer(case), whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_depend_on_the_row_alone(dtype):
    spec = BASE.replace(dtype=dtype, alibi="sqrt", sinks=True, head_size=40, num_q_heads=6, num_kv_heads=2)
    rows = (Row(1, 300), Row(17, 90), Row(5, 61), Row(1, 300))
    batch = make_case(spec, rows)
    out, lse = answer(batch, torch.float32)
    for i in range(len(rows)):
        alone_out, alone_lse = answer(batch.alone(i), torch.float32)
        assert torch.equal(out[batch.tokens(i)], alone_out) and torch.equal(lse[batch.tokens(i)], alone_lse)
    elsewhere = answer(make_case(spec, rows, place="high"), torch.float32)
    assert torch.equal(out, elsewhere[0]) and torch.equal(lse, elsewhere[1])


def test_fp32_stays_fp32_where_the_process_allows_less():
    case = make_case(BASE, ROWS)
    want = answer(case, torch.float32)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(answer(case, torch.float32)[0], want[0])
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_keys_need_a_place():
    with pytest.raises(TypeError, match="block_table, or kv_start_loc"):
        reference.reference_attention(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), query_lens=[1], seq_lens=[1], scale=1.0)
