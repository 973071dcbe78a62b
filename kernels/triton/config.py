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
        programs: how many of them a multiprocessor holds at once, or should: the keys of rows are cut until there are so many, and registers bounded.
        part: tiles of a part, about, at the least: cutting a unit into equal ones may halve it.
        prefetch: how many tiles ahead page ids are read.
        descriptors: whether tensor descriptors copy the tiles where the device has them and a page holds the tile.
        swap: whether keys and values, not queries, lie along the long side of the matrix unit, which takes 64 rows or more on Hopper.
        source: the measurement or reason behind the row of the table.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    part: int
    prefetch: int
    descriptors: bool
    swap: bool
    source: str


@dataclass(frozen=True, slots=True)
class Target:
    """What a configuration must know of the device: ``cuda``, ``rocm``, ``xpu`` or ``cpu``, bytes of shared memory a block, and whether
    tensor descriptors can copy tiles.
    """

    type: str
    arch: str
    shared_memory: int
    descriptors: bool = False


def _tile(m: int, n: int, warps: int, stages: int, programs: int, flags: str, source: str, part: int = 1) -> LaunchConfig:
    """Flags: P prefetch, by so many tiles; W swap; - no descriptors."""
    return LaunchConfig(m, n, warps, stages, programs, part, flags.count("P"), "-" not in flags, "W" in flags, source)


_PART = 8
"""Tiles of a part in prefill: many rows are merged there."""
_ROWS = "128 rows a tile, whose accumulator 8 warps hold without spilling"
_MEMORY = "one 16-row tile holds a group of heads; decode is bound by memory"
_SHARED = "several tokens share each key that is read"
_WIDE = "no spills on sm80, sm90 and gfx942, where twice the keys or rows do spill"
_SCALAR = "true fp32 runs on the scalar units: larger tiles only spill"
_H200 = "sweep on an H200, 2026-11-30: docs/performance.md"

_TABLE: dict[tuple[str, int, int], LaunchConfig] = {
    # kind, bytes of the compute dtype, head size at most
    ("prefill", 2, 64): _tile(128, 64, 8, 2, 1, "P", _ROWS, _PART),
    ("prefill", 2, 128): _tile(64, 64, 8, 2, 1, "P", _WIDE, _PART),
    ("prefill", 2, 256): _tile(64, 32, 8, 2, 1, "P", _WIDE, _PART),
    ("prefill", 2, 512): _tile(32, 32, 8, 2, 1, "P", _WIDE, _PART),
    ("verify", 2, 64): _tile(64, 64, 4, 3, 2, "", _SHARED),
    ("verify", 2, 128): _tile(64, 32, 4, 3, 2, "", _WIDE),
    ("verify", 2, 256): _tile(32, 32, 8, 2, 2, "", _WIDE),
    ("verify", 2, 512): _tile(32, 32, 8, 2, 1, "", _WIDE),
    ("decode", 2, 64): _tile(16, 64, 4, 3, 4, "", _MEMORY),
    ("decode", 2, 128): _tile(16, 64, 4, 3, 3, "", _MEMORY),
    ("decode", 2, 256): _tile(16, 32, 4, 3, 2, "", _WIDE),
    ("decode", 2, 512): _tile(16, 32, 8, 2, 1, "", _WIDE),
    ("prefill", 4, 64): _tile(32, 32, 8, 1, 2, "P", _SCALAR, _PART),
    ("prefill", 4, 128): _tile(32, 16, 4, 1, 2, "P", _SCALAR, _PART),
    ("prefill", 4, 256): _tile(32, 16, 8, 1, 1, "P", _SCALAR, _PART),
    ("prefill", 4, 512): _tile(16, 16, 8, 1, 1, "P", _SCALAR, _PART),
    ("decode", 4, 64): _tile(16, 32, 4, 1, 4, "", _SCALAR),
    ("decode", 4, 128): _tile(16, 16, 4, 1, 4, "", _SCALAR),
    ("decode", 4, 256): _tile(16, 16, 4, 1, 2, "", _SCALAR),
    ("decode", 4, 512): _tile(16, 16, 8, 1, 1, "", _SCALAR),
}
_HOPPER: dict[tuple[str, int, int], LaunchConfig] = {
    # kind, bytes of the cache's dtype, head size at most; the compute dtype has two
    ("prefill", 2, 64): _tile(128, 64, 8, 2, 2, "P", _H200, _PART),
    ("prefill", 2, 128): _tile(128, 128, 8, 2, 1, "P", _H200, _PART),
    ("prefill", 2, 256): _tile(128, 64, 8, 2, 1, "P-", _H200, _PART),
    ("prefill", 2, 512): _tile(64, 16, 8, 3, 1, "P", _H200, _PART),
    ("long", 2, 128): _tile(256, 64, 8, 4, 1, "P", _H200, 4 * _PART),
    ("verify", 2, 64): _tile(64, 128, 4, 3, 2, "PP", _H200),
    ("verify", 2, 128): _tile(64, 64, 4, 3, 2, "PP", _H200),
    ("few", 2, 64): _tile(32, 128, 4, 3, 2, "PPW-", _H200),
    ("few", 2, 128): _tile(32, 128, 8, 3, 1, "PPW-", _H200),
    ("decode", 2, 64): _tile(16, 128, 4, 3, 2, "PPW-", _H200),
    ("decode", 2, 128): _tile(16, 64, 4, 3, 2, "PPW-", _H200),
    ("decode", 2, 256): _tile(16, 64, 4, 2, 1, "PP", _H200),
    ("decode", 2, 512): _tile(16, 16, 4, 3, 2, "PP", _H200),
    ("prefill", 1, 64): _tile(128, 64, 4, 2, 2, "P", _H200, _PART),
    ("prefill", 1, 128): _tile(128, 128, 8, 2, 1, "P", _H200, _PART),
    ("long", 1, 128): _tile(256, 64, 8, 2, 1, "P", _H200, 4 * _PART),
    ("few", 1, 128): _tile(32, 32, 2, 3, 4, "PP", _H200),
    ("decode", 1, 64): _tile(16, 128, 4, 3, 4, "PP", _H200),
    ("decode", 1, 128): _tile(16, 128, 4, 3, 3, "PP", _H200),
}
_HOPPER_DESCRIBED: dict[tuple[str, int, int], LaunchConfig] = {
    # the same, where a page holds the tile and a descriptor copies it
    ("prefill", 2, 128): _tile(128, 128, 8, 3, 1, "P", _H200, _PART),
    ("long", 2, 128): _tile(128, 64, 4, 2, 2, "P", _H200, 4 * _PART),
    ("decode", 2, 256): _tile(16, 64, 4, 3, 1, "PPW", _H200),
}
_FROM_SHARED = _tile(128, 64, 8, 2, 1, "P", _ROWS, _PART)
"""Prefill at head size 128 where matrix units read their operands from shared memory."""


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n`` (and 16, the least that a matrix unit takes)."""
    return max(16, 1 << (n - 1).bit_length())


def launch_config(
    target: Target, kind: str, max_query_len: int, group: int, head_size: int, v_head_size: int, element: int, kv_element: int, page_size: int
) -> LaunchConfig | None:
    """The configuration for a launch, or ``None`` when no tile fits the device's shared memory.

    Args:
        target: the device.
        kind: ``decode`` (rows of at most 16 query tokens), ``prefill``, or ``long`` (the same rows, where together they fill the device half
            again; as ``prefill``, where nothing else was measured).
        max_query_len: query tokens of the longest row, to choose between decode and verify tiles.
        group: query heads a KV head.
        head_size, v_head_size: elements.
        element, kv_element: bytes of the compute dtype and of the cache's.
        page_size: keys a page; 0 for packed keys.
    """
    least = smallest_tile(group)
    rows = power_of_two(max_query_len * group)
    if kind == "decode" and rows > 16 and element == 2:
        kind = "verify"
    size = next((size for size in (64, 128, 256) if max(power_of_two(head_size), power_of_two(v_head_size)) <= size), 512)
    lookup = (size, element, kv_element, page_size)
    config = _measured(target, "few" if kind == "verify" and rows <= 32 else kind, *lookup)
    if config is None and kind == "long":
        config = _measured(target, "prefill", *lookup)
    config = config or _TABLE["prefill" if kind == "long" else kind, element, size]
    if kind == "verify":
        config = replace(config, block_m=min(rows, config.block_m))
    if target.type == "rocm":  # loads go through registers there, and bytes take more of them
        keys = 16 if size == 512 else config.block_n // 2 if kv_element < element == 2 else config.block_n
        warps = 4 if size == 512 and (element == 4 or kind == "decode" or kv_element < element) else config.num_warps
        config = replace(config, block_n=keys, num_warps=warps, num_stages=1)
    if target.type == "cpu":  # the interpreter: small tiles, small tests
        config = replace(config, block_m=64 if kind == "long" else 16, block_n=16)
    if config.block_m < least.block_m:
        config = replace(config, block_m=least.block_m, num_warps=8)
    while shared_memory(target, config, head_size, v_head_size, element, kv_element, page_size) > target.shared_memory > 0:
        if config.num_stages > 1:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > least.block_n:
            config = replace(config, block_n=config.block_n // 2)
        elif config.block_m > least.block_m:
            config = replace(config, block_m=config.block_m // 2)
        else:
            return None
    return config


def _measured(target: Target, kind: str, size: int, element: int, kv_element: int, page_size: int) -> LaunchConfig | None:
    """What was found by measurement on the target, if anything was."""
    if element != 2:
        return None
    if not target.arch.startswith("sm90"):
        return _FROM_SHARED if (kind, size, kv_element) == ("prefill", 128, 2) and reads_shared(target) else None
    by_descriptors = _HOPPER_DESCRIBED.get((kind, kv_element, size))
    if by_descriptors is not None and target.descriptors and described(by_descriptors, page_size):
        return by_descriptors
    return _HOPPER.get((kind, kv_element, size))


def reads_shared(target: Target) -> bool:
    """Whether matrix units read tiles where they lie in shared memory (wgmma, tcgen05), not from registers."""
    return target.arch.startswith(("sm90", "sm10"))


def described(config: LaunchConfig, page_size: int) -> bool:
    """Whether tensor descriptors are to copy the tiles, where the device has them: a page must hold a tile."""
    return config.descriptors and page_size > 0 and page_size % config.block_n == 0


def smallest_tile(group: int) -> LaunchConfig:
    """What is tried last: the group's heads times 16 keys, without pipelining."""
    return _tile(power_of_two(group), 16, 4, 1, 1, "", "the least that the matrix units take")


def shared_memory(target: Target, config: LaunchConfig, head_size: int, v_head_size: int, element: int, kv_element: int, page_size: int = 0) -> int:
    """Bytes of shared memory a block uses at most. A bound, held against what compilers report for each target.

    The Q block, the weights and the tiles in flight; or the accumulator, when it changes its layout to be stored.
    """
    d, dv, m, n = power_of_two(head_size), power_of_two(v_head_size), config.block_m, config.block_n
    wide = max(element, kv_element)
    q, weights, k, v = m * d * element, m * n * element, n * d * wide, n * dv * wide
    by_descriptors = target.descriptors and element == kv_element == 2 and described(config, page_size)
    whole = by_descriptors or (reads_shared(target) and (m >= 64 or config.swap))  # the product is of whole tiles where they lie
    if config.num_stages == 1:
        tiles = max(k, v)  # one after the other in the same place
    else:
        # a stage that is read where it lies is free only when its product is done
        tiles = (k + v) * (config.num_stages if whole else config.num_stages - 1)
    if target.type == "rocm" and config.num_stages == 1:
        return max(q, tiles) + weights + 2048  # everything passes through on its way to registers
    if whole and m >= 64 and not config.swap and element == 2 and target.arch.startswith("sm90"):
        weights = 0  # wgmma takes them from registers
    return max(q + weights + tiles + 2048, m * dv * 4)
