"""Launch configurations: what fits is found, what does not is refused at selection with its numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from attnmux.backends.triton import FittingSizes
from attnmux.dispatch.device import Device
from attnmux.dispatch.query import Query
from attnmux.dispatch.spec import AttentionSpec
from attnmux.kernels.triton.config import Target, launch_config, power_of_two, shared_memory, smallest_tile

KIB = 1024
TARGETS = {
    "turing": Target("cuda", "sm75", 64 * KIB),
    "ampere": Target("cuda", "sm80", 163 * KIB),
    "ada": Target("cuda", "sm89", 99 * KIB),
    "hopper": Target("cuda", "sm90", 227 * KIB, True),
    "blackwell": Target("cuda", "sm100", 227 * KIB, True),
    "mi300": Target("rocm", "gfx942", 64 * KIB),
    "intel": Target("xpu", "xe2", 128 * KIB),
    "interpreter": Target("cpu", "x86_64", 0),
}
ROWS = [("prefill", 300), ("long", 3000), ("decode", 1), ("decode", 5), ("decode", 16)]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_what_is_chosen_fits_and_nothing_that_fits_is_refused(target):
    for size, group, element, kv_element, page in product((16, 72, 128, 192, 256, 512), (1, 3, 8, 71, 128), (2, 4), (1, 4), (0, 1, 16, 1056)):
        kv_element = min(kv_element, element)
        needs = shared_memory(target, smallest_tile(group), size, size, element, kv_element)
        for kind, length in ROWS:
            config = launch_config(target, kind, length, group, size, size, element, kv_element, page)
            assert (config is None) == (needs > target.shared_memory > 0)
            if config is None:
                continue
            assert config.block_m >= power_of_two(group)
            assert config.block_m & (config.block_m - 1) == config.block_n & (config.block_n - 1) == 0
            assert min(config.block_m, config.block_n) >= 16
            assert min(config.programs, config.part) >= 1
            assert not config.swap or (target.arch == "sm90" and kind == "decode" and config.block_n >= 64)  # wgmma's long side
            if target.shared_memory:
                assert shared_memory(target, config, size, size, element, kv_element, page) <= target.shared_memory


def test_decode_tiles_are_no_larger_than_the_row_needs():
    hopper = TARGETS["hopper"]
    rows = [launch_config(hopper, "decode", n, 4, 128, 128, 2, 2, 16).block_m for n in (1, 4, 5, 8, 16)]
    assert rows == [16, 16, 32, 32, 64]


def test_more_of_anything_takes_more_memory():
    plain = smallest_tile(64)
    plain = replace(plain, block_n=64, num_stages=2)
    for target in TARGETS.values():
        least = shared_memory(target, plain, 64, 64, 2, 2)
        assert shared_memory(target, replace(plain, num_stages=3), 64, 64, 2, 2) > least
        assert shared_memory(target, replace(plain, block_n=128), 64, 64, 2, 2) > least
        assert shared_memory(target, plain, 512, 512, 2, 2) > least
        assert shared_memory(target, plain, 64, 64, 4, 4) > least


def test_a_measured_tile_is_taken_where_it_was_measured():
    hopper = TARGETS["hopper"]
    assert launch_config(hopper, "decode", 1, 4, 128, 128, 2, 2, 16).swap
    assert not launch_config(TARGETS["ampere"], "decode", 1, 4, 128, 128, 2, 2, 16).swap
    assert not launch_config(hopper, "decode", 1, 4, 128, 128, 2, 1, 16).swap  # an fp8 cache passes through registers
    assert launch_config(hopper, "prefill", 300, 4, 128, 128, 2, 2, 16).num_stages == 2
    assert launch_config(hopper, "prefill", 300, 4, 128, 128, 2, 2, 128).num_stages == 3  # a page holds the tile, a descriptor copies it
    assert launch_config(hopper, "long", 3000, 4, 128, 128, 2, 2, 16).block_m == 256
    assert launch_config(hopper, "long", 3000, 4, 128, 128, 2, 2, 64).programs == 2


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_long_rows_are_as_prefill_where_nothing_else_was_measured(target):
    for size, element, kv_element, page in product((64, 128, 256, 512), (2, 4), (1, 2, 4), (0, 16, 128)):
        sizes = (3000, 4, size, size, element, min(kv_element, element), page)
        measured = target.type == "cpu" or (target.arch == "sm90" and size == 128 and element == 2)
        assert (launch_config(target, "long", *sizes) != launch_config(target, "prefill", *sizes)) == measured


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_selection_refuses_exactly_what_does_not_fit(target):
    sizes = FittingSizes(16, 512, of=8)
    device = Device(target.type, target.arch, "", "", shared_memory=target.shared_memory)
    for size, group, dtype in product((64, 128, 256, 512), (1, 8, 71, 200), (torch.float16, torch.float32)):
        spec = AttentionSpec(group, 1, size, dtype)
        found = launch_config(target, "prefill", 300, group, size, size, dtype.itemsize, dtype.itemsize, 16)
        query = Query(spec, device, "prefill")
        assert sizes.accepts(size, query) == (found is not None)
        if found is None:
            needs = shared_memory(target, smallest_tile(group), size, size, dtype.itemsize, dtype.itemsize)
            said = sizes.wants_for(size, query)
            assert f"{needs} bytes with {group} query heads a KV head" in said
            assert f"fits {target.shared_memory} bytes of shared memory" in said


def test_a_size_out_of_range_is_refused_for_its_range():
    query = Query(AttentionSpec(4, 2, 20, torch.float16), Device("cuda", "sm90", "", "", shared_memory=227 * KIB), "prefill")
    assert not FittingSizes(16, 512, of=8).accepts(20, query)
    assert FittingSizes(16, 512, of=8).wants_for(20, query) == "16 to 512 in steps of 8"
