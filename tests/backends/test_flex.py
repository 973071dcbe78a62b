"""FlexAttention against the float64 oracle: on a CPU as it runs there, and in place as on a GPU, by torch and by a stand-in for the kernel."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

import attnmux
import attnmux.testing
from attnmux.dispatch.spec import AttentionSpec
from attnmux.kernels.flex import look, run, step, tiles
from attnmux.testing import Case, Row, make_case

BASE = AttentionSpec(4, 2, 16, torch.float32, return_lse=True)
ROWS = (
    Row(40, 130, spans=((60, 80), (95, 128)), causal=False),
    Row(1, 150, prefix_len=20),
    Row(7, 90, spans=((10, 30, 0), (85, 90, 0)), causal=False),
    Row(0, 30),
    Row(3, 0),
    Row(20, 64, prefix_len=0),
    Row(1, 17),
)


@attnmux.testing.parametrize_backend_checks("flex", device="cpu", quick=True)
def test_conformance(flex, check):
    check.run()


def skipping(kind, spread, q, k, v, tables, slopes, options):
    """What the GPU's kernel does: each tile multiplies the blocks it is given, all their keys, and no others."""
    out, lse = torch.zeros(*q.shape[:3], v.shape[-1]), torch.full(q.shape[:3], -torch.inf)
    group, page = q.shape[1] // k.shape[1], kind.page_size
    mask, score = look.mask_of(kind, tables, spread), look.score_of(kind, tables, spread, slopes)
    m = torch.arange(q.shape[2])[:, None]
    for tile, head in product(range(q.shape[0]), range(q.shape[1])):
        blocks = tables.blocks[tile, 0, 0, : int(tables.num_blocks[tile])]
        n = (blocks[:, None] * page + torch.arange(page)).flatten()
        if len(n):
            b, h = torch.tensor(tile), torch.tensor(head)
            scores = q[tile, head].float() @ k[0, head // group, n].float().T * kind.scale
            scores = scores if score is None else score(scores, b, h, m, n[None])
            scores = scores.masked_fill(~mask(b, h, m, n[None]), -torch.inf)
            lse[tile, head] = scores.logsumexp(-1)
            out[tile, head] = torch._safe_softmax(scores, -1) @ v[0, head // group, n].float()
    return out.to(q.dtype), lse


@pytest.fixture
def stand_in(flex, monkeypatch):
    """Answers of the in-place form over a pool full of NaN."""
    monkeypatch.setattr(run, "attend", skipping)
    return lambda case: flex.computed(case, in_place=True)


FEATURES = {
    "window": {"sliding_window": 5},
    "chunk": {"chunk": (24, 1)},
    "spans": {"mm_prefix": "override_window"},
    "spans_within": {"mm_prefix": "within_window"},
    "rswa": {"rswa_window": 4},
    "not_causal": {"causal": False},
    "per_sequence": {"causal": "per_sequence"},
    "encoder": {"attn_type": "encoder_only"},
    "cross": {"attn_type": "cross"},
    "linear": {"alibi": "linear"},
    "sqrt": {"alibi": "sqrt"},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "packed": {"page_size": None},
    "wide_page": {"page_size": 64},
    "odd_head": {"head_size": 24},
    "odd_group": {"num_q_heads": 6},
    "no_lse": {"return_lse": False},
}


def spec_of(names: tuple[str, ...]) -> AttentionSpec:
    return BASE.replace(**{"causal": None, **{k: v for name in names for k, v in FEATURES[name].items()}})


def compatible(names: tuple[str, ...]) -> bool:
    fields = [field for name in names for field in FEATURES[name]]
    try:
        return len(set(fields)) == len(fields) and bool(spec_of(names))
    except ValueError:  # a combination without meaning
        return False


def covering() -> list[tuple[str, ...]]:
    """Few combinations in which every two features that may stand together do."""
    wanted = [pair for pair in combinations(FEATURES, 2) if compatible(pair)]
    found = []
    while wanted:
        names: tuple[str, ...] = ()
        for pair in wanted:
            longer = tuple(dict.fromkeys((*names, *pair)))
            names = longer if compatible(longer) else names
        found.append(names)
        wanted = [pair for pair in wanted if not set(pair) <= set(names)]
    return found


def case_of(names: tuple[str, ...], rows: tuple[Row, ...] = ROWS) -> Case:
    spec = spec_of(names)
    if spec.attn_type == "encoder_only":
        rows = tuple(Row(row.kv_len if row.q_len else 0, row.kv_len) for row in rows[2:])
    return make_case(spec, rows)


@pytest.mark.parametrize("names", covering(), ids="+".join)
def test_every_two_features_together(flex, names):
    case = case_of(names)
    assert flex.error(case, flex.computed(case)) <= 1


@pytest.mark.parametrize("names", covering(), ids="+".join)
def test_every_two_features_in_place_over_a_dirty_pool(flex, names, stand_in):
    case = case_of(names)
    assert flex.error(case, stand_in(case)) <= 1


@pytest.mark.parametrize("names", [("window",), ("spans", "linear"), ("rswa", "sinks"), ("per_sequence", "softcap"), ("cross", "bf16")], ids="+".join)
def test_torch_in_place(flex, names):
    """The same tables through torch's FlexAttention, over a pool that is finite everywhere."""
    case = flex.clean(case_of(names))
    assert flex.error(case, flex.computed(case, in_place=True)) <= 1


def test_the_stand_in_is_torch(flex):
    case = flex.clean(case_of(("spans", "linear")))
    plan = flex.planned(case, True)
    spread = run.spread_of(case.k_cache, case.v_cache)
    assert spread == 2  # the kit's pools share one storage
    whole = next(part for part in plan.parts(True) if part.source is None and part.size == tiles.LONG_TILE)
    q = case.q[whole.tokens].view(-1, whole.size, 4, 16).transpose(1, 2)
    tables = whole.over(case.k_cache.shape[0], spread)
    args = (plan.look, spread, q, run.pool_view(case.k_cache, spread), run.pool_view(case.v_cache, spread), tables, case.layer["alibi_slopes"], None)
    with run._plain():
        want = look.attend(*args)
    for got, wanted in zip(skipping(*args), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("in_place", [False, True])
def test_rows_that_share_pages(flex, in_place, stand_in):
    """A prefix at the same place in both rows, and a page that stands elsewhere in the other row."""
    case = make_case(BASE.replace(alibi="linear"), (Row(20, 90), Row(1, 70), Row(2, 50)))
    table = case.batch.block_table
    table[1, :3] = table[0, :3]
    table[2, 0] = table[0, 4]
    table[2, 2] = table[0, 1]
    assert flex.error(case, stand_in(case) if in_place else flex.computed(case)) <= 1


def test_another_rows_nan_stays_there(flex, stand_in):
    case = make_case(BASE, (Row(3, 40), Row(1, 60), Row(20, 30)))
    want, _ = flex.computed(case)
    for key in range(60):
        for cache in (case.k_cache, case.v_cache):
            cache[case.places[1][key // 16], key % 16] = torch.nan
    others = [*range(3), *range(4, 24)]
    for got, _ in (flex.computed(case), stand_in(case)):
        assert torch.isnan(got[3]).all()
        torch.testing.assert_close(got[others], want[others], rtol=0, atol=1e-5)


def strided(cache: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers in a view with other strides, NaN around them."""
    pages, page, heads, size = cache.shape
    wider = {
        "together": (pages, page, heads, size),
        "every third": (3 * pages, page, heads, size),
        "odd": (pages, page + 3, heads, size),
        "heads": (pages, page, heads + 1, size),
        "columns": (pages, page, heads, size + 5),
    }
    storage = torch.full(wider[how], torch.nan)
    view = storage[::3] if how == "every third" else storage[:, :page, :heads, :size]
    return view.copy_(cache)


SPREADS = {"together": 1, "every third": 3, "odd": None, "heads": 1, "columns": 1}


@pytest.mark.parametrize("how", SPREADS)
def test_caches_of_any_strides(flex, how, stand_in):
    case = make_case(BASE, (Row(1, 70), Row(3, 33), Row(40, 90), Row(1, 300)))
    case.k_cache, case.v_cache = strided(case.k_cache, how), strided(case.v_cache, how)
    assert run.spread_of(case.k_cache, case.v_cache) == SPREADS[how]
    assert flex.error(case, stand_in(case)) <= 1
    assert flex.error(case, flex.computed(case)) <= 1


def test_two_pools_of_different_strides_are_copied(flex, stand_in):
    case = make_case(BASE, (Row(1, 70), Row(20, 33)))
    case.v_cache = strided(case.v_cache, "every third")
    assert run.spread_of(case.k_cache, case.v_cache) is None
    assert flex.error(case, stand_in(case)) <= 1


CONTROLS = {
    "the mask": lambda m: m.setattr(look, "_ahead", lambda kind, tables, row, d: torch.ones_like(d, dtype=torch.bool)),
    "spans": lambda m: m.setattr(look, "_same_span", lambda family, row, q, k, last: torch.zeros_like(q - k, dtype=torch.bool)),
    "ALiBi": lambda m: m.setattr(look, "score_of", lambda *a: None),
    "merging": lambda m: m.setattr(run, "_share", lambda part, total: torch.ones_like(part)[..., None]),
    "tails": lambda m: m.setattr(step, "apart", lambda found, page: (found, [])),
    "zeros behind the tails": lambda m: m.setattr(run.torch, "where", _first_or_given(torch.where)),
    "where pages stand": lambda m: m.setattr(step.Part, "over", _in_order(step.Part.over)),
}


def _first_or_given(where):
    return lambda condition, a, b: a if isinstance(b, int) and isinstance(a, torch.Tensor) else where(condition, a, b)


def _in_order(over):
    def wrong(self, pages, spread):
        tables = over(self, pages, spread)
        return tables if self.owned is None else tables._replace(logical=tables.logical.roll(1, 1))

    return wrong


@pytest.mark.parametrize("broken", CONTROLS)
def test_a_broken_route_is_noticed(flex, broken, stand_in, monkeypatch):
    case = case_of(("spans", "linear"))
    assert flex.error(case, stand_in(case)) <= 1
    with monkeypatch.context() as m:
        CONTROLS[broken](m)
        got = stand_in(case)
    assert flex.error(case, got) > 2
