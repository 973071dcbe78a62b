"""What FlexAttention is given: tiles, tables and kernel options, what is compiled for them and how often, and what is refused."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._dynamo.testing import CompileCounter

import attnmux
from attnmux.backends.flex_backend import FlexBackend
from attnmux.dispatch.spec import AttentionSpec
from attnmux.kernels.flex import run, tiles
from attnmux.kernels.masks import Sight
from attnmux.testing import Row, make_case

BASE = AttentionSpec(4, 2, 16, torch.float32, return_lse=True)


def test_tiles_read_exactly_the_pages_that_they_see(flex):
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


def test_no_page_that_a_row_does_not_fill_is_read_in_place(flex):
    case = make_case(BASE, (Row(1, 37), Row(20, 64), Row(17, 17), Row(2, 5)))
    parts = flex.planned(case, True).parts(True)
    in_place = {int(page) for part in parts if part.owned is not None for page in part.owned[1]}
    copied = {int(page) for part in parts if part.source is not None for page in part.source}
    assert in_place == {*case.places[0][:2], *case.places[1], case.places[2][0]}
    assert copied == {case.places[0][2], case.places[2][1], case.places[3][0]}


def test_scores_that_do_not_fit_at_once(flex, monkeypatch):
    case = make_case(BASE, (Row(300, 600), Row(1, 900), Row(5, 40)))
    few = len(flex.planned(case, False).parts(False))
    monkeypatch.setattr(tiles, "MAX_SCORES", 4 * 128 * 256)
    assert len(flex.planned(case, False).parts(False)) > few
    assert flex.error(case, flex.computed(case)) <= 1


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
def test_nothing_is_compiled_when_lengths_change(flex, changes):
    """One graph for pages in place and one for copied ones; a tile size more doubles them, once."""
    counter = CompileCounter()
    spec = BASE.replace(**changes)
    for rows in BATCHES:
        case = flex.clean(make_case(spec, [Row(r.q_len, r.kv_len, spans=((1, 4),) if r.kv_len > 5 else ()) for r in rows]))
        assert flex.error(case, flex.computed(case, in_place=True, compiler=counter)) <= 1
    assert counter.frame_count == 2
    for rows in ([Row(40, 90)], [Row(1, 9), Row(300, 301)], [Row(200, 200), Row(130, 128 + 37)]):
        case = flex.clean(make_case(spec, rows))
        assert flex.error(case, flex.computed(case, in_place=True, compiler=counter)) <= 1
    assert counter.frame_count == 4


@pytest.mark.parametrize("changes", [{"alibi": "linear"}, {"attn_type": "encoder_only"}, {"page_size": None}], ids=str)
def test_warmup_compiles_all_that_lengths_can_reach(changes, flex):
    counter = CompileCounter()
    spec = BASE.replace(**{"causal": None, **changes})
    graphs = 4 if spec.page_size is None else 8
    backend = FlexBackend(spec, attnmux.select(spec, "cpu", require="flex").device, {})
    backend._gpu, backend._compiler = True, counter
    backend.warmup(attnmux.Limits(8, 512, 512, 512))
    assert counter.frame_count == graphs
    for q_len, kv_len in ((1, 90), (300, 300), (3, 64)):
        row = Row(kv_len if spec.attn_type == "encoder_only" else q_len, kv_len)
        for alone, mode in product((False, True), (torch.no_grad, torch.inference_mode)):
            with mode():
                case = flex.clean(make_case(spec, (row, row, row)))
                case.k_cache, case.v_cache = (pool.clone() if alone else pool for pool in (case.k_cache, case.v_cache))
                assert flex.error(case, flex.computed(case, in_place=True, compiler=counter)) <= 1
    assert counter.frame_count == graphs
    backend._gpu = False
    backend.warmup(attnmux.Limits(8, 512, 512, 512))
    assert counter.frame_count == graphs


def test_many_kinds_of_layers_compile_side_by_side(flex):
    """torch refuses a function's ninth graph, and takes a number that differs from the last graph's for a variable."""
    symbols = []

    def compiler(graph, inputs):
        symbols.append(sum(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward

    for window in range(1, 13):
        page_size = 16 if window % 2 else 32
        case = flex.clean(make_case(BASE.replace(sliding_window=window, page_size=page_size), (Row(1, 32), Row(1, 64))))
        assert flex.error(case, flex.computed(case, in_place=True, compiler=compiler)) <= 1
    assert len(symbols) == 12
    assert len(set(symbols)) == 1


@pytest.mark.parametrize(("size", "page"), list(product((16, 24, 64, 80, 128, 192, 256), (16, 32, 64, 128, 256))))
def test_the_kernels_tiles_divide_blocks_and_fit(flex, size, page):
    for tile, dtype in product((tiles.SHORT_TILE, tiles.LONG_TILE), (torch.float32, torch.bfloat16)):
        chosen = run.kernel_options(tile, page, size, dtype)
        m, n = chosen["BLOCK_M"], chosen["BLOCK_N"]
        assert tile % m == 0 and page % n == 0 and min(m, n) >= 16
        row = 2 ** math.ceil(math.log2(size)) * dtype.itemsize
        assert m * row + chosen["num_stages"] * 2 * n * row <= 99 * 1024
        assert chosen["FLOAT32_PRECISION"] == "'ieee'"


def test_a_pool_of_one_page(flex):
    case = make_case(BASE, (Row(1, 16),))
    page = case.places[0][0]
    case.k_cache, case.v_cache = (pool[page : page + 1].clone() for pool in (case.k_cache, case.v_cache))
    case.batch.block_table.zero_()
    assert flex.error(case, flex.computed(case, in_place=True, compiler=CompileCounter())) <= 1


def test_torchs_switch_is_put_back(flex):
    case = make_case(BASE, (Row(1, 9),))
    for value in (False, True):
        torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = value
        try:
            flex.computed(case)
            assert torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is value
        finally:
            torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False


def test_fp32_is_fp32_whatever_is_allowed_elsewhere(flex):
    case = make_case(BASE, (Row(40, 130), Row(1, 150), Row(7, 90)))
    want, _ = flex.computed(case)
    torch.set_float32_matmul_precision("medium")
    try:
        got, _ = flex.computed(case)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(got[:48], want[:48])


def test_what_it_cannot_do_exactly_it_refuses(flex):
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


def test_it_is_chosen_by_name_only_on_a_cpu(flex):
    spec = BASE.replace(softcap=2.0)
    assert attnmux.select(spec, "cpu").name == "reference"
    assert attnmux.select(spec, "cpu", prefer="flex").name == "flex"
