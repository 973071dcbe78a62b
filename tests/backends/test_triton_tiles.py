"""Which rows take which tile, and for which launches a step makes room."""

from __future__ import annotations

import pytest
import torch

import attnmux

pytest.importorskip("triton", reason="needs triton")

from attnmux.backends._triton_tiles import MOST_TOKENS, Tiles
from attnmux.dispatch.devices import resolve
from attnmux.dispatch.registry import Registry
from attnmux.dispatch.spec import AttentionSpec, Limits

LLAMA = AttentionSpec(32, 8, 128, torch.bfloat16, page_size=16)


def tiles(spec: AttentionSpec = LLAMA, arch: str = "sm90", programs: int | None = None) -> Tiles:
    return Tiles(spec, resolve(f"cuda:{arch}", Registry(entry_points=False).catalog, ()), 132, programs)


def batch(*query_lens: int) -> attnmux.Batch:
    lens = torch.tensor(query_lens, dtype=torch.int32)
    starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    return attnmux.Batch(starts, lens, torch.zeros(len(query_lens), 4096, dtype=torch.int32), query_lens_cpu=query_lens, seq_lens_cpu=query_lens)


def test_a_step_takes_larger_tiles_where_its_rows_fill_the_device_half_again():
    most = 3 * 132 * 256 // 2 // 32
    assert tiles().most_prefill_tokens == most
    for lens in ((most,), (most - 17, 17), (most, 1, 16)):
        assert "prefill" in tiles().kinds(batch(*lens)) and "long" in tiles().kinds(batch(*lens, 17)), lens
    described = tiles(LLAMA.replace(page_size=128))  # half the queries in a tile, but two tiles at once
    assert described.most_prefill_tokens == most and described.config("long", 4000).descriptors
    assert tiles(LLAMA.replace(num_q_heads=8, num_kv_heads=2)).most_prefill_tokens == 4 * most
    assert tiles(programs=66).most_prefill_tokens == most // 2


@pytest.mark.parametrize(
    ("changes", "arch"),
    [({}, "sm80"), ({}, "sm100"), ({"head_size": 64}, "sm90"), ({"head_size": 256}, "sm90"), ({"batch_invariant": True}, "sm90")],
)
def test_elsewhere_prefill_steps_are_all_alike(changes, arch):
    assert tiles(LLAMA.replace(**changes), arch).kinds(batch(100_000, 1)) == {"prefill": 100_000, "decode": 1}


def test_encoder_rows_are_never_decode_rows():
    found = tiles(LLAMA.replace(attn_type="encoder_only"))
    assert found.kinds(batch(1, 40)) == {"prefill": 40} and found.kinds(batch(1, 9000)) == {"long": 9000}


def test_each_launch_of_a_step_comes_with_its_longest_row():
    assert tiles().kinds(batch(1, 3, 2)) == {"decode": 3}
    assert tiles().kinds(batch(1, 20, 0, 300, 3)) == {"prefill": 300, "decode": 3}
    assert tiles().kinds(batch(1, 20, 0, 5000, 300, 2000, 3)) == {"long": 5000, "decode": 3}
    assert tiles().kinds(batch(0, 0)) == {}
    assert tiles().kinds(batch(16, 1)) == {"decode": 16} and tiles().kinds(batch(17, 16)) == {"prefill": 17, "decode": 16}


def test_either_tile_of_prefill_is_for_every_row_that_a_graph_may_replay_there():
    lengths = tiles().lengths
    assert lengths["long"] == lengths["prefill"] == (17, MOST_TOKENS) and lengths["decode"] == (1, 16)


def test_limits_reach_each_tile_once():
    def kinds(*limits: int) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for (kind, config), length in tiles().reachable(Limits(*limits)).items():
            found.setdefault(kind, []).append(config.block_m)
            assert length <= limits[3] and tiles().lengths[kind][0] <= length <= tiles().lengths[kind][1]
        return {kind: sorted(rows) for kind, rows in found.items()}

    decode = [16, 32, 64]
    assert kinds(8, 4096, 8192, 4096) == {"decode": decode, "prefill": [128], "long": [256]}
    assert kinds(8, 4096, 8192, 1000) == {"decode": decode, "prefill": [128], "long": [256]}  # several rows fill the device too
    assert kinds(1, 4096, 8192, 1000) == kinds(8, 1000, 8192, 4096) == kinds(2, 4096, 700, 4096) == {"decode": decode, "prefill": [128]}
    most = tiles().most_prefill_tokens
    assert "long" not in kinds(1, most, 8192, 4096) and "long" in kinds(1, most + 1, 8192, 4096)
    assert kinds(8, 4096, 8192, 16) == {"decode": decode}
    assert kinds(8, 4096, 8192, 4) == {"decode": [16]}


def test_there_is_room_for_every_cut_of_the_tokens_into_rows():
    found, limits = tiles(), Limits(max_num_seqs=64, max_num_tokens=8192, max_seq_len=16384, max_query_len=8192)
    for kind, block_q in (("long", 64), ("prefill", 32)):  # the last blocks of rows need not be full
        assert found.room_within(kind, found.config(kind, 8192), limits).units == 64 + 8192 // block_q


def test_without_limits_there_is_room_for_the_rows_of_a_launch():
    step = batch(1, 16, 17, 64, 0, 5000)
    for kind, block_m, units in (("decode", 64, 2), ("prefill", 128, 1 + 2 + 157), ("long", 256, 1 + 1 + 79)):
        config = tiles().config(kind, 5000)
        assert config.block_m == block_m and tiles().room(kind, config, None, step).units == units


def test_cross_attention_has_more_queries_than_keys():
    limits = Limits(8, 4096, 100, 4096)
    assert {kind for kind, _ in tiles(LLAMA.replace(attn_type="cross")).reachable(limits)} == {"decode", "prefill", "long"}
    assert {kind for kind, _ in tiles().reachable(limits)} == {"decode", "prefill"}


def test_what_always_fills_the_device_is_always_long():
    found = tiles(programs=1)
    assert found.most_prefill_tokens < 17 and found.kinds(batch(17)) == {"long": 17}
    assert {kind for kind, _ in found.reachable(Limits(8, 4096, 8192, 4096))} == {"decode", "long"}
