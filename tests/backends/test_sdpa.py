"""The CPU route against the float64 oracle: errors at most twice torch's own at that precision, plus 1e-5."""

from __future__ import annotations

import json
import runpy
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attnmux
from attnmux.dispatch.spec import AttentionSpec
from attnmux.kernels.sdpa import run, step, tiles
from attnmux.testing import Case, Row, make_case
from attnmux.testing.measure import distance, oracle

BASE = AttentionSpec(4, 2, 16, torch.float32, page_size=8, return_lse=True)


def computed(case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The route's answer, written into NaN."""
    attention = attnmux.Attention(case.spec, "cpu", require="sdpa")
    plan = attention.plan(case.batch)
    assert {name for names in plan.routes.values() for name in names} <= {"sdpa"}
    out, lse = case.outputs()
    result = attention.run(case.q, case.k_cache, case.v_cache, plan, out=out, **case.layer)
    if lse is None:
        return result, None
    assert result[0] is out
    return result


def error(case: Case) -> tuple[float, float]:
    """How far the answer is from the truth, as parts of what is allowed."""
    want, n = oracle(case), case.batch.num_tokens
    out, lse = computed(case)
    assert torch.isnan(out[n:]).all()
    off = distance(out[:n], want.out) / want.out_allowed
    return off, 0.0 if lse is None else distance(lse[:n], want.lse) / want.lse_allowed


FEATURES = {
    "window": {"sliding_window": 5},
    "chunk": {"chunk": (8, 1)},
    "spans": {"mm_prefix": "override_window"},
    "spans_within": {"mm_prefix": "within_window"},
    "rswa": {"rswa_window": 4},
    "not_causal": {"causal": False},
    "per_sequence": {"causal": "per_sequence"},
    "encoder": {"attn_type": "encoder_only"},
    "cross": {"attn_type": "cross"},
    "linear": {"alibi": "linear"},
    "sqrt": {"alibi": "sqrt"},
    "sinks": {"sinks": True},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "hnd": {"kv_layout": "HND"},
    "packed": {"page_size": None},
    "page_of_one": {"page_size": 1},
    "narrow_values": {"v_head_size": 8},
    "wide_values": {"v_head_size": 21},
    "odd_head": {"head_size": 7},
    "no_lse": {"return_lse": False},
    "multi_query": {"num_kv_heads": 1},
    "multi_head": {"num_kv_heads": 4},
}


def compatible(names: tuple[str, ...]) -> bool:
    fields = [field for name in names for field in FEATURES[name]]
    if len(set(fields)) < len(fields):
        return False
    try:
        spec = spec_of(names)
    except ValueError:  # a combination without meaning
        return False
    return all(getattr(spec, field) == value for name in names for field, value in FEATURES[name].items())  # packed keys have one layout


def covering() -> list[tuple[str, ...]]:
    """Few combinations in which every two features that may stand together do."""
    wanted = [pair for pair in combinations(FEATURES, 2) if compatible(pair)]
    found = []
    while wanted:
        names: tuple[str, ...] = ()
        for pair in wanted:
            longer = tuple(dict.fromkeys((*names, *pair)))
            if compatible(longer):
                names = longer
        found.append(names)
        wanted = [pair for pair in wanted if not set(pair) <= set(names)]
    return found


def spec_of(names: tuple[str, ...]) -> AttentionSpec:
    return BASE.replace(**{"causal": None, **{k: v for name in names for k, v in FEATURES[name].items()}})


@pytest.mark.parametrize("names", covering(), ids="+".join)
def test_every_two_features_together(names):
    off, lse_off = error(make_case(spec_of(names)))
    assert off <= 1 and lse_off <= 1


@pytest.mark.parametrize("names", covering(), ids="+".join)
def test_every_two_features_over_many_tiles(names, monkeypatch):
    """With small tiles: several a row, several calls a segment, several parts."""
    for module, name, value in ((tiles, "SHORT_KEYS", 16), (tiles, "LONG_KEYS", 32), (tiles, "MASKED_TOKENS", 20), (step, "PARTIAL_BYTES", 20_000)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(tiles, "PADDING_BYTES", 4096)
    spec = spec_of(names)
    rows = (
        Row(40, 130, spans=((60, 80), (95, 128))),
        Row(1, 150, prefix_len=20),
        Row(7, 90, spans=((10, 30, 0), (85, 90, 0))),
        Row(0, 30),
        Row(1, 17),
    )
    if spec.attn_type == "encoder_only":
        rows = tuple(Row(row.kv_len if row.q_len else 0, row.kv_len) for row in rows[2:])
    off, lse_off = error(make_case(spec, rows))
    assert off <= 1 and lse_off <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["shuffled", "low"])
def test_long_rows(dtype, place):
    spec = AttentionSpec(2, 1, 8, dtype, sinks=dtype == torch.float32, return_lse=True)
    case = make_case(spec, (Row(1, 3000), Row(2049, 2060), Row(16, 1200), Row(300, 300)), place=place)
    off, lse_off = error(case)
    assert off <= 1 and lse_off <= 1


ROW = st.builds(
    Row,
    q_len=st.sampled_from([0, 1, 2, 5, 16, 17, 40]),
    kv_len=st.sampled_from([0, 40, 41, 64, 77, 130, 600]),
    prefix_len=st.sampled_from([0, 3, 50, 700]),
    causal=st.booleans(),
    spans=st.sampled_from([(), ((3, 30),), ((25, 39),), ((0, 9, 0), (12, 22, 1), (30, 40, 0), (1000, 1001))]),
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ROW, min_size=1, max_size=5), st.sampled_from(covering()), st.sampled_from([1, 16, 48]))
def test_random_rows(rows, names, page_size):
    spec = spec_of(names)
    if spec.attn_type == "encoder_only":
        rows = [Row(row.kv_len if row.q_len else 0, row.kv_len) for row in rows]
    off, lse_off = error(make_case(spec.replace(page_size=page_size if spec.page_size else None), rows))
    assert off <= 1 and lse_off <= 1


CONTROLS = {
    "the mask": lambda m: m.setattr(step._Builder, "_mask", lambda *a: None),
    "tokens that see nothing of a tile": lambda m: m.setattr(step.Tensor, "masked_fill", lambda self, *a: self),
    "merging": lambda m: m.setattr(run, "merge", lambda out, lse, *a: (out, lse)),
    "sinks": lambda m: m.setattr(run, "_add_sinks", lambda out, lse, sinks: (out, lse)),
    "padding": lambda m: m.setattr(run.torch.Tensor, "index_fill_", lambda self, *a: self),
    "the square's mask": lambda m: m.setattr(run, "_flash", _blind_to_causality(run._flash)),
    "ALiBi": lambda m: m.setattr(run, "_alibi", lambda work, *a: work.mask.expand(-1, -1, -1, 2, -1).flatten(2, 3) if work.folded else work.mask),
}


def _blind_to_causality(kernel):
    return lambda q, k, v, dropout, causal, **rest: kernel(q, k, v, dropout, False, **rest)


@pytest.mark.parametrize("broken", CONTROLS)
def test_a_broken_route_is_noticed(broken, monkeypatch):
    spec = BASE.replace(alibi="linear", head_size=16) if broken == "ALiBi" else BASE.replace(sinks=True)
    rows = (Row(1, 700), Row(3, 30), Row(2, 27), Row(40, 60))
    if broken == "tokens that see nothing of a tile":
        spec, rows = spec.replace(sliding_window=5), (Row(12, 520),)
    case = make_case(spec, rows)
    assert max(error(case)) <= 1
    if broken == "padding":  # the blanked keys are NaN here, and NaN times no weight is NaN
        assert case.k_cache.isnan().any()
    CONTROLS[broken](monkeypatch)
    out, lse = computed(case)
    monkeypatch.undo()
    want, n = oracle(case), case.batch.num_tokens
    assert distance(out[:n], want.out) > 2 * want.out_allowed or distance(lse[:n], want.lse) > 2 * want.lse_allowed


def test_entries_that_nobody_sees_are_not_followed():
    for changes in ({"sliding_window": 20}, {"rswa_window": 9}, {"chunk": (32, 0)}, {"mm_prefix": "override_window", "sliding_window": 5}):
        spec = BASE.replace(**changes)
        case = make_case(spec, (Row(1, 130), Row(30, 600, spans=((2, 9, 0), (570, 600, 0))), Row(0, 50)))
        want, _ = computed(case)
        hidden = case.batch.block_table == -1
        assert hidden.sum() > 20
        case.batch.block_table[hidden] = 10**7
        assert torch.equal(computed(case)[0].nan_to_num(nan=9), want.nan_to_num(nan=9))


def strided(cache: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers in a view with other strides, NaN around them."""
    pages, page, heads, size = cache.shape
    wider = {
        "pages": (pages, page + 3, heads, size),
        "heads": (pages, page, heads + 1, size),
        "columns": (pages, page, heads, size + 5),
    }
    view = torch.full(wider[how], torch.nan)[:, :page, :heads, :size]
    return view.copy_(cache)


@pytest.mark.parametrize("how", ["pages", "heads", "columns"])
def test_caches_of_any_strides(how):
    case = make_case(BASE, (Row(1, 70), Row(3, 33), Row(40, 90), Row(1, 600)))
    want = computed(case)
    case.k_cache, case.v_cache = strided(case.k_cache, how), strided(case.v_cache, how)
    for got, wanted in zip(computed(case), want, strict=True):
        torch.testing.assert_close(got[:45], wanted[:45], rtol=0, atol=1e-6)


def test_outputs_that_are_views():
    case = make_case(BASE, (Row(2, 40), Row(20, 20)))
    want, _ = computed(case)
    wide = torch.full((want.shape[0], 6, 20), torch.nan)
    attention = attnmux.Attention(case.spec, "cpu", require="sdpa")
    attention.run(case.q, case.k_cache, case.v_cache, attention.plan(case.batch), out=wide[:, 1:5, 2:18])
    assert torch.equal(wide[:22, 1:5, 2:18], want[:22])
    assert torch.isnan(wide[:, 0]).all() and torch.isnan(wide[..., :2]).all() and torch.isnan(wide[22:]).all()


def test_equal_scores_give_the_mean_of_what_is_seen():
    case = make_case(BASE.replace(sliding_window=6), (Row(3, 30), Row(20, 50)))
    case.q.zero_()
    out, lse = computed(case)
    for i, row in enumerate(case.rows):
        _, _, values = case.dense(i)
        for j in range(row.q_len):
            position = row.kv_len - row.q_len + j
            seen = values[max(0, position - 5) : position + 1].repeat_interleave(2, 1)
            token = case.tokens(i).start + j
            torch.testing.assert_close(out[token].double(), seen.mean(0), rtol=0, atol=1e-6)
            torch.testing.assert_close(lse[token], torch.full((4,), float(len(seen))).log(), rtol=0, atol=1e-6)


def test_values_that_name_their_key_read_out_the_chosen_one():
    spec = AttentionSpec(2, 1, 16, torch.float32, page_size=4, scale=1.0)
    case = make_case(spec, (Row(1, 700),))
    for key in range(700):
        case.v_cache[case.batch.block_table[0, key // 4].long(), key % 4] = float(key)
    chosen = 613
    case.q[0] = 40 * case.k_cache[case.batch.block_table[0, chosen // 4].long(), chosen % 4]
    torch.testing.assert_close(computed(case)[0][0], torch.full((2, 16), float(chosen)), rtol=0, atol=1e-3)


def test_a_changed_key_changes_only_the_tokens_that_see_it():
    case = make_case(BASE.replace(rswa_window=5, return_lse=False), (Row(20, 60, prefix_len=7), Row(2, 30)))
    before, _ = computed(case)
    for key, seers in ((3, range(20)), (20, ()), (43, range(3, 8)), (59, (19,))):
        with case.changed_keys([(0, key)]):
            changed = (computed(case)[0] != before).flatten(1).any(1)[:22]
        assert changed.nonzero()[:, 0].tolist() == list(seers), key


def test_a_tail_of_infinity_stays_out():
    case = make_case(BASE, (Row(1, 37), Row(2, 19), Row(18, 21)))
    want, _ = computed(case)
    for cache in (case.k_cache, case.v_cache):
        cache.nan_to_num_(nan=torch.inf)
    assert torch.equal(computed(case)[0][:21], want[:21])


def test_what_it_cannot_do_exactly_it_refuses():
    for changes, field in (
        ({"softcap": 30.0}, "softcap"),
        ({"kv_dtype": torch.float8_e4m3fn}, "kv_dtype"),
        ({"q_dtype": torch.float8_e5m2}, "q_dtype"),
        ({"batch_invariant": True}, "batch_invariant"),
    ):
        with pytest.raises(attnmux.NoBackendError, match=field):
            attnmux.Attention(BASE.replace(**changes), "cpu", require="sdpa")


def test_the_benchmark_runs(monkeypatch, tmp_path, capsys):
    results = tmp_path / "results.json"
    path = Path(__file__).parents[2] / "benchmarks" / "cpu_sdpa.py"
    monkeypatch.setattr("sys.argv", [path.name, "--rows", "2", "--keys", "40", "--repeat", "1", "--layout", "HND", "--json", str(results)])
    runpy.run_path(str(path), run_name="__main__")
    assert "sdpa" in capsys.readouterr().out
    found = json.loads(results.read_text())["results"]
    assert {(r["phase"], r["dtype"]) for r in found} == {(p, d) for p in ("prefill", "decode") for d in ("fp32", "bf16")}
