"""FlexAttention against the float64 oracle: on a CPU as it runs there, and in place as on a GPU, by torch and by a stand-in for the kernel."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._dynamo.testing import CompileCounter

import attnmux
import attnmux.testing
from attnmux.backends.flex_backend import FlexBackend
from attnmux.dispatch.spec import AttentionSpec
from attnmux.kernels.flex import look, run, step, tiles
from attnmux.kernels.masks import Sight
from attnmux.testing import Case, Row, make_case
from attnmux.testing.measure import distance, oracle

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


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@attnmux.testing.parametrize_backend_checks("flex", device="cpu", quick=True)
def test_conformance(check):
    check.run()


def planned(case: Case, in_place: bool) -> step.Step:
    backend = FlexBackend(case.spec, attnmux.select(case.spec, "cpu", require="flex").device, {})
    backend._gpu = in_place
    return backend.plan(case.batch, None, None)


def computed(case: Case, in_place: bool = False, compiler: object = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The answer, written into NaN."""
    out, lse = case.outputs()
    args = case.layer_args
    plan = planned(case, in_place)
    run.run_step(plan, case.q, case.k_cache, case.v_cache, out, lse, args.sinks, args.alibi_slopes, in_place=in_place, compiler=compiler)
    return out, lse


def error(case: Case, got: tuple[torch.Tensor, torch.Tensor | None]) -> float:
    """How far the answer is from the truth, as part of what is allowed."""
    want, n = oracle(case), case.batch.num_tokens
    off = distance(got[0][:n], want.out) / want.out_allowed
    assert torch.isnan(got[0][n:]).all()
    return off if got[1] is None else max(off, distance(got[1][:n], want.lse) / want.lse_allowed)


def clean(case: Case) -> Case:
    """Finite numbers where a backend must not look: torch's plain formulas multiply them by 0."""
    for cache in (case.k_cache, case.v_cache):
        cache.nan_to_num_(nan=300.0)
    return case


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
def stand_in(monkeypatch):
    """Answers of the in-place form over a pool full of NaN."""
    monkeypatch.setattr(run, "attend", skipping)
    return lambda case: computed(case, in_place=True)


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
def test_every_two_features_together(names):
    case = case_of(names)
    assert error(case, computed(case)) <= 1


@pytest.mark.parametrize("names", covering(), ids="+".join)
def test_every_two_features_in_place_over_a_dirty_pool(names, stand_in):
    case = case_of(names)
    assert error(case, stand_in(case)) <= 1


@pytest.mark.parametrize("names", [("window",), ("spans", "linear"), ("rswa", "sinks"), ("per_sequence", "softcap"), ("cross", "bf16")], ids="+".join)
def test_torch_in_place(names):
    """The same tables through torch's FlexAttention, over a pool that is finite everywhere."""
    case = clean(case_of(names))
    assert error(case, computed(case, in_place=True)) <= 1


def test_the_stand_in_is_torch():
    case = clean(case_of(("spans", "linear")))
    plan = planned(case, True)
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
def test_rows_that_share_pages(in_place, stand_in):
    """A prefix at the same place in both rows, and a page that stands elsewhere in the other row."""
    case = make_case(BASE.replace(alibi="linear"), (Row(20, 90), Row(1, 70), Row(2, 50)))
    table = case.batch.block_table
    table[1, :3] = table[0, :3]
    table[2, 0] = table[0, 4]
    table[2, 2] = table[0, 1]
    assert error(case, stand_in(case) if in_place else computed(case)) <= 1


def test_another_rows_nan_stays_there(stand_in):
    case = make_case(BASE, (Row(3, 40), Row(1, 60), Row(20, 30)))
    want, _ = computed(case)
    for key in range(60):
        for cache in (case.k_cache, case.v_cache):
            cache[case.places[1][key // 16], key % 16] = torch.nan
    others = [*range(3), *range(4, 24)]
    for got, _ in (computed(case), stand_in(case)):
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
def test_caches_of_any_strides(how, stand_in):
    case = make_case(BASE, (Row(1, 70), Row(3, 33), Row(40, 90), Row(1, 300)))
    case.k_cache, case.v_cache = strided(case.k_cache, how), strided(case.v_cache, how)
    assert run.spread_of(case.k_cache, case.v_cache) == SPREADS[how]
    assert error(case, stand_in(case)) <= 1
    assert error(case, computed(case)) <= 1


def test_two_pools_of_different_strides_are_copied(stand_in):
    case = make_case(BASE, (Row(1, 70), Row(20, 33)))
    case.v_cache = strided(case.v_cache, "every third")
    assert run.spread_of(case.k_cache, case.v_cache) is None
    assert error(case, stand_in(case)) <= 1


def test_tiles_read_exactly_the_pages_that_they_see():
    sight = Sight(window=20, mm_prefix="override_window")
    row = tiles.Row(0, 5, 40, 300, True, ((3, 9, 0), (270, 280, 0)))
    seen = 0
    for tile in tiles.cut(row, 16, sight, 16):
        q_pos = tile.position + torch.arange(tile.count)[:, None]
        pages = sight.mask(q_pos, torch.arange(300)[None], True, 300, row.spans).any(0).nonzero()[:, 0] // 16
        assert list(tile.columns) == pages.unique().tolist()
        assert tile.token - 5 == tile.position - 260
        seen += tile.count
    assert seen == 40


def test_no_page_that_a_row_does_not_fill_is_read_in_place():
    case = make_case(BASE, (Row(1, 37), Row(20, 64), Row(17, 17), Row(2, 5)))
    parts = planned(case, True).parts(True)
    in_place = {int(page) for part in parts if part.owned is not None for page in part.owned[1]}
    copied = {int(page) for part in parts if part.source is not None for page in part.source}
    assert in_place == {*case.places[0][:2], *case.places[1], case.places[2][0]}
    assert copied == {case.places[0][2], case.places[2][1], case.places[3][0]}


def test_scores_that_do_not_fit_at_once(monkeypatch):
    case = make_case(BASE, (Row(300, 600), Row(1, 900), Row(5, 40)))
    few = len(planned(case, False).parts(False))
    monkeypatch.setattr(tiles, "MAX_SCORES", 4 * 128 * 256)
    assert len(planned(case, False).parts(False)) > few
    assert error(case, computed(case)) <= 1


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
def test_a_broken_route_is_noticed(broken, stand_in, monkeypatch):
    case = case_of(("spans", "linear"))
    assert error(case, stand_in(case)) <= 1
    with monkeypatch.context() as m:
        CONTROLS[broken](m)
        got = stand_in(case)
    assert error(case, got) > 2


BATCHES = (
    [Row(1, 37), Row(1, 20)],
    [Row(1, 5)],
    [Row(2, 400), Row(0, 5), Row(3, 100), Row(1, 16), Row(1, 7)],
    [Row(1, 64)],
    [Row(16, 241)] * 5,
    [Row(2, 16), Row(4, 16)],
)


@pytest.mark.parametrize(
    "changes",
    [{}, {"mm_prefix": "override_window"}, {"rswa_window": 9}, {"causal": "per_sequence", "alibi": "sqrt"}, {"num_kv_heads": 4}],
    ids=str,
)
def test_nothing_is_compiled_when_lengths_change(changes):
    """One graph for pages in place and one for copied ones; a tile size more doubles them, once."""
    counter = CompileCounter()
    spec = BASE.replace(**changes)
    for rows in BATCHES:
        case = clean(make_case(spec, [Row(r.q_len, r.kv_len, spans=((1, 4),) if r.kv_len > 5 else ()) for r in rows]))
        assert error(case, computed(case, in_place=True, compiler=counter)) <= 1
    assert counter.frame_count == 2
    for rows in ([Row(40, 90)], [Row(1, 9), Row(300, 301)], [Row(200, 200), Row(130, 128 + 37)]):
        case = clean(make_case(spec, rows))
        assert error(case, computed(case, in_place=True, compiler=counter)) <= 1
    assert counter.frame_count == 4


def test_many_kinds_of_layers_compile_side_by_side():
    """torch refuses a function's ninth graph; each kind of layer has its own."""
    counter = CompileCounter()
    for window in range(1, 13):
        case = clean(make_case(BASE.replace(sliding_window=window), (Row(1, 32), Row(1, 48))))
        assert error(case, computed(case, in_place=True, compiler=counter)) <= 1
    assert counter.frame_count == 12


@pytest.mark.parametrize(("size", "page"), product((16, 24, 64, 80, 128, 192, 256), (16, 32, 64, 128, 256)))
def test_the_kernels_tiles_divide_blocks_and_fit(size, page):
    for tile, dtype in product((tiles.SHORT_TILE, tiles.LONG_TILE), (torch.float32, torch.bfloat16)):
        chosen = run.kernel_options(tile, page, size, dtype)
        m, n = chosen["BLOCK_M"], chosen["BLOCK_N"]
        assert tile % m == 0 and page % n == 0 and min(m, n) >= 16
        row = 2 ** math.ceil(math.log2(size)) * dtype.itemsize
        assert m * row + chosen["num_stages"] * 2 * n * row <= 99 * 1024
        assert chosen["FLOAT32_PRECISION"] == "'ieee'"


def test_torchs_switch_is_put_back():
    case = make_case(BASE, (Row(1, 9),))
    for value in (False, True):
        torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = value
        try:
            computed(case)
            assert torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is value
        finally:
            torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False


def test_fp32_is_fp32_whatever_is_allowed_elsewhere():
    case = make_case(BASE, ROWS)
    want, _ = computed(case)
    torch.set_float32_matmul_precision("medium")
    try:
        got, _ = computed(case)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(got[:72], want[:72])


def test_what_it_cannot_do_exactly_it_refuses():
    for changes, field in (
        ({"kv_layout": "HND"}, "kv_layout"),
        ({"page_size": 48}, "page_size"),
        ({"head_size": 8}, "head_size"),
        ({"head_size": 512}, "head_size"),
        ({"v_head_size": 32}, "v_head_size"),
        ({"kv_dtype": torch.float8_e4m3fn}, "kv_dtype"),
        ({"q_dtype": torch.float8_e5m2}, "q_dtype"),
        ({"batch_invariant": True}, "batch_invariant"),
    ):
        with pytest.raises(attnmux.NoBackendError, match=field):
            attnmux.Attention(BASE.replace(**changes), "cpu", require="flex")
    case = make_case(BASE, lengths="upper_bound")
    with pytest.raises(attnmux.NoBackendError, match="lengths"):
        attnmux.Attention(BASE, "cpu", require="flex").plan(case.batch)


def test_it_is_chosen_by_name_only_on_a_cpu():
    spec = BASE.replace(softcap=2.0)
    assert attnmux.select(spec, "cpu").name == "reference"
    assert attnmux.select(spec, "cpu", prefer="flex").name == "flex"
