"""Launch configurations from a table, checked against the device's shared memory. No autotuning at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Tile shape and resources of one launch.

    Args:
        block_m: rows of a Q block (query tokens times heads of a group).
        block_n: keys of a tile.
        num_warps, num_stages: as Triton takes them.
        staged: whether tiles that need no mask get a loop of their own (worth its code for long prefill only).
        source: the measurement or reason behind the row of the table.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    staged: bool
    source: str


@dataclass(frozen=True, slots=True)
class Target:
    """What a configuration must know of the device: ``cuda``, ``rocm``, ``xpu`` or ``cpu``, and bytes of shared memory a block."""

    type: str
    arch: str
    shared_memory: int


_DECODE = LaunchConfig(16, 64, 4, 3, False, "one 16-row tile holds a group of heads; decode is bound by memory")
_VERIFY = LaunchConfig(64, 64, 4, 3, False, "several tokens share each key that is read")
_PREFILL = LaunchConfig(128, 64, 8, 2, True, "128 rows a tile; 8 warps hold the accumulator without spilling")


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n`` (and 16, the least that a matrix unit takes)."""
    return max(16, 1 << (n - 1).bit_length())


def launch_config(
    target: Target, decode: bool, max_query_len: int, group: int, head_size: int, v_head_size: int, element: int, kv_element: int, page_size: int
) -> LaunchConfig | None:
    """The configuration for a launch, or ``None`` when no tile fits the device's shared memory.

    Args:
        target: the device.
        decode: rows of at most 16 query tokens.
        max_query_len: query tokens of the longest row, to choose between decode and verify tiles.
        group: query heads a KV head.
        head_size, v_head_size: elements.
        element, kv_element: bytes of the compute dtype and of the cache's.
        page_size: keys a page; 0 for packed keys.
    """
    d, dv = power_of_two(head_size), power_of_two(v_head_size)
    config = _PREFILL
    if decode:
        rows = power_of_two(max_query_len * group)
        config = _DECODE if rows <= 16 else replace(_VERIFY, block_m=min(rows, 64))
    if element == 4:  # true fp32 runs on the scalar units: large tiles only spill
        config = replace(config, block_m=min(config.block_m, 32), block_n=32, num_stages=1)
    if max(d, dv) > 128 and config.block_m > 64:
        config = replace(config, block_m=64, num_warps=8 if max(d, dv) > 256 else 4)
    if max(d, dv) > 256:
        config = replace(config, block_n=32)
    if target.type == "rocm":
        config = replace(config, num_stages=1)
    if target.type == "cpu":  # the interpreter: small tiles, small tests
        config = replace(config, block_m=16, block_n=16)
    if power_of_two(group) > config.block_m:
        config = replace(config, block_m=power_of_two(group))
    while shared_memory(config, d, dv, element, kv_element) > target.shared_memory > 0:
        if config.num_stages > 1:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > 16:
            config = replace(config, block_n=config.block_n // 2)
        elif config.block_m > power_of_two(group):
            config = replace(config, block_m=config.block_m // 2)
        else:
            return None
    return config


def shared_memory(config: LaunchConfig, d: int, dv: int, element: int, kv_element: int) -> int:
    """Bytes of shared memory a block uses at most: the Q block, the weights, and the tiles in flight."""
    tiles = config.num_stages * config.block_n * (d + dv) * max(kv_element, element)
    return config.block_m * d * element + config.block_m * config.block_n * element + tiles + 1024
