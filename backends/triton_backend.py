"""The adapter to our own Triton kernels: a spec becomes kernel constants, a batch becomes work items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnmux.dispatch.backend import Backend, LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.device import Device
from attnmux.dispatch.spec import DTYPE_NAMES, MAX_DECODE_TOKENS, AttentionSpec, Limits
from attnmux.kernels.triton import launch
from attnmux.kernels.triton.config import LaunchConfig, Target, launch_config
from attnmux.kernels.triton.schedule import Reach, capacity, schedule

INVARIANT_CUT_KEYS = 2048
"""Keys a part has in decode under ``batch_invariant``."""


@dataclass(slots=True)
class State:
    """A step: its rows on the device, and one launch for decode rows and one for the rest."""

    rows: launch.Rows
    work: dict[str, launch.Work]


class TritonBackend(Backend):
    """Options: ``programs``, how many programs a launch is cut into (default: four for each multiprocessor)."""

    def __init__(self, spec: AttentionSpec, device: Device, options: Mapping[str, Any]) -> None:
        super().__init__(spec, device, options)
        self._torch_device = torch.device(device.torch_device)
        self._programs = int(options.get("programs", 4 * _multiprocessors(self._torch_device)))
        self._target = Target(device.type, device.arch, device.shared_memory)
        self._features = features_of(spec, device)
        self._scales: dict[float, Tensor] = {}
        self._limits: Limits | None = None

    def workspace_bytes(self, limits: Limits) -> int:
        self._limits = limits
        return max(self._slot_bytes(kind, limits) for kind in ("prefill", "decode"))

    def warmup(self, limits: Limits) -> None:
        """Compile what the limits can reach: a launch of each kind over one row of each length that changes the tile."""
        for length in sorted({1, min(MAX_DECODE_TOKENS, limits.max_query_len), limits.max_query_len}):
            self._run_once(length)

    def plan(self, batch: Batch, workspace: Tensor | None, previous: Any) -> State:
        decode_like = self.spec.attn_type != "encoder_only"
        kinds = {
            "prefill": [r for r, n in enumerate(batch.query_lens) if n > (MAX_DECODE_TOKENS if decode_like else 0)],
            "decode": [r for r, n in enumerate(batch.query_lens) if 0 < n <= MAX_DECODE_TOKENS and decode_like],
        }
        earlier: State | None = previous
        rows = self._rows(batch, earlier)
        work = {}
        for kind, members in kinds.items():
            before = earlier.work.get(kind) if earlier else None
            if members or before:
                work[kind] = self._work(kind, members, batch, workspace, before)
        return State(rows, work)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, state: State, out: Tensor, lse: Tensor | None, layer: LayerArgs) -> None:
        if self.spec.page_size is not None and self.spec.kv_layout == "HND":
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        inputs = launch.Layer(layer.sinks, layer.alibi_slopes, self._scale(layer.q_scale), self._scale(layer.k_scale), self._scale(layer.v_scale))
        for work in state.work.values():
            launch.attend(q, k_cache, v_cache, out, lse, state.rows, work, self._features, inputs)

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, layer: LayerArgs) -> None:
        if self.spec.page_size is not None and self.spec.kv_layout == "HND":
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        for new, cache, scale in ((k, k_cache, layer.k_scale), (v, v_cache, layer.v_scale)):
            launch.store(new, cache, slot_mapping, self._scale(scale), self.spec.page_size or 0, self.spec.kv_scale == "head")

    def _run_once(self, length: int) -> None:
        """One row of so many query tokens over a pool of its own, so that the kernels of its kind are compiled."""
        spec, device = self.spec, self._torch_device
        pages = -(-length // (spec.page_size or length))
        keys = (length,) if spec.page_size is None else (pages, spec.page_size) if spec.kv_layout == "NHD" else (pages,)
        tail = (spec.num_kv_heads, spec.page_size) if spec.page_size is not None and spec.kv_layout == "HND" else (spec.num_kv_heads,)
        k = torch.zeros((*keys, *tail, spec.head_size), dtype=torch.uint8, device=device).to(spec.kv_dtype)
        v = torch.zeros((*keys, *tail, spec.v_head_size), dtype=torch.uint8, device=device).to(spec.kv_dtype)
        starts, lens = self._to_device([0, length]), self._to_device([length])
        paged = spec.page_size is not None
        batch = Batch(
            starts,
            lens,
            block_table=self._to_device([list(range(pages))]) if paged else None,
            kv_start_loc=None if paged else starts,
            causal=torch.ones(1, dtype=torch.bool, device=device) if spec.causal == "per_sequence" else None,
            prefix_lens=lens if spec.rswa_window else None,
            query_lens_cpu=[length],
            seq_lens_cpu=[length],
        )
        q = torch.zeros((length, spec.num_q_heads, spec.head_size), device=device).to(spec.q_dtype)
        out = torch.empty((length, spec.num_q_heads, spec.v_head_size), dtype=spec.dtype, device=device)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=device) if spec.return_lse else None
        scales = torch.ones(spec.num_kv_heads if spec.kv_scale == "head" else (), device=device) if spec.kv_scale else None
        heads = torch.zeros(spec.num_q_heads, device=device)
        layer = LayerArgs(heads if spec.sinks else None, heads if spec.alibi else None, None, scales, scales)
        self.run(q, k, v, self.plan(batch, None, None), out, lse, layer)

    def _work(self, kind: str, members: list[int], batch: Batch, workspace: Tensor | None, before: launch.Work | None) -> launch.Work:
        spec = self.spec
        config = before.config if before else self._config(kind, max(batch.query_lens[r] for r in members))
        cut = self._cut_tiles(kind, config)
        prefix = 0 if batch.prefix_lens is None else 1 << 30  # an estimate: the prefix is read whole
        reach = Reach(spec.rswa_window or spec.sliding_window, prefix, spec.causal is not True)
        plan = schedule(
            members, batch.query_lens, batch.key_lens, reach, config.block_m // spec.group, config.block_n, spec.num_kv_heads, self._programs, cut
        )
        items_held, slots_held = (len(plan.items), plan.slots) if self._limits is None else self._capacity(kind, config, self._limits)
        items = _table(plan.items, items_held, 5, before.items if before else None, self._torch_device)
        merges = _table(plan.merges, slots_held, 4, before.merges if before else None, self._torch_device)
        slot_out, slot_lse = self._slots(slots_held, config, workspace)
        return launch.Work(items, merges, len(plan.items), len(plan.merges), slot_out, slot_lse, config, cut)

    def _config(self, kind: str, max_query_len: int) -> LaunchConfig:
        spec = self.spec
        if spec.batch_invariant:  # the tile of a row must not depend on its neighbours
            max_query_len = MAX_DECODE_TOKENS
        found = launch_config(
            self._target,
            kind == "decode",
            max_query_len,
            spec.group,
            spec.head_size,
            spec.v_head_size,
            spec.dtype.itemsize,
            spec.kv_dtype.itemsize,
            spec.page_size or 0,
        )
        if found is None:
            raise ValueError(
                f"no tile of head_size {spec.head_size} fits the {self._target.shared_memory} bytes of shared memory of {self.device.name}"
            )
        return found

    def _cut_tiles(self, kind: str, config: LaunchConfig) -> int:
        if not self.spec.batch_invariant:
            return 0
        return max(1, INVARIANT_CUT_KEYS // config.block_n) if kind == "decode" else 1 << 24

    def _capacity(self, kind: str, config: LaunchConfig, limits: Limits) -> tuple[int, int]:
        block_q = config.block_m // self.spec.group
        longest = min(limits.max_query_len, MAX_DECODE_TOKENS) if kind == "decode" else limits.max_query_len
        blocks = min(limits.max_num_seqs * -(-longest // block_q), limits.max_num_seqs + limits.max_num_tokens // block_q)
        return capacity(blocks, -(-limits.max_seq_len // config.block_n), self.spec.num_kv_heads, self._programs, self._cut_tiles(kind, config))

    def _slot_bytes(self, kind: str, limits: Limits) -> int:
        lengths = (1, MAX_DECODE_TOKENS) if kind == "decode" else (limits.max_query_len,)
        sizes = []
        for length in lengths:
            config = self._config(kind, length)
            slots = self._capacity(kind, config, limits)[1]
            sizes.append(slots * self.spec.num_kv_heads * config.block_m * (self.spec.v_head_size + 1) * 4)
        return max(sizes)

    def _slots(self, slots: int, config: LaunchConfig, workspace: Tensor | None) -> tuple[Tensor, Tensor]:
        shape = (slots, self.spec.num_kv_heads, config.block_m)
        lses = slots * self.spec.num_kv_heads * config.block_m
        size = lses * (self.spec.v_head_size + 1)
        if workspace is None or self._limits is None:
            flat = torch.empty(size, dtype=torch.float32, device=self._torch_device)
        else:
            flat = workspace[: size * 4].view(torch.float32)
        return flat[lses:].view(*shape, self.spec.v_head_size), flat[:lses].view(shape)

    def _rows(self, batch: Batch, earlier: State | None) -> launch.Rows:
        table = batch.block_table if batch.block_table is not None else batch.kv_start_loc
        assert table is not None  # checked with the batch
        held = earlier.rows if earlier else None
        seqs = self._limits.max_num_seqs if self._limits else 0
        columns = 0 if self._limits is None or self.spec.page_size is None else -(-self._limits.max_seq_len // self.spec.page_size)
        starts, row_spans, groups = _spans(batch) if self.spec.mm_prefix else ([], [], False)

        def own(new: Tensor, name: str, *shape: int) -> Tensor:
            """With limits a graph may hold the buffer: ours, as large as the limits, and filled anew by every plan."""
            if self._limits is None:
                return new
            buffer: Tensor | None = getattr(held, name) if held else None
            if buffer is None:
                buffer = torch.empty(tuple(map(max, new.shape, shape)), dtype=new.dtype, device=new.device)
            buffer[tuple(slice(n) for n in new.shape)].copy_(new, non_blocking=True)
            return buffer

        return launch.Rows(
            query_start_loc=own(batch.query_start_loc, "query_start_loc", seqs + 1),
            seq_lens=own(batch.seq_lens, "seq_lens", seqs),
            table=own(table, "table", *((seqs, columns) if columns else (seqs + 1,))),
            prefix_lens=None if batch.prefix_lens is None else own(batch.prefix_lens, "prefix_lens", seqs),
            causal=None if batch.causal is None else own(batch.causal, "causal", seqs),
            row_span_start=self._to_device(starts) if row_spans else None,
            row_spans=self._to_device(row_spans) if row_spans else None,
            groups=groups,
        )

    def _to_device(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self._torch_device, non_blocking=True)

    def _scale(self, scale: Tensor | float | None) -> Tensor | None:
        if scale is None or isinstance(scale, Tensor):
            return None if scale is None else scale.reshape(-1)
        if scale not in self._scales:
            self._scales[scale] = torch.tensor([scale], dtype=torch.float32, device=self._torch_device)
        return self._scales[scale]


def features_of(spec: AttentionSpec, device: Device) -> launch.Features:
    """The kernel's constants for a spec on a device."""
    native = device.type == "cuda" and DTYPE_NAMES[spec.kv_dtype] in device.features  # Triton converts fnuz on AMD only, and slowly
    window = spec.sliding_window or 0
    chunk, lookback = spec.chunk or (0, 0)
    return launch.Features(
        scale=spec.scale,
        dtype=spec.dtype,
        page_size=spec.page_size or 0,
        causal=2 if spec.causal == "per_sequence" else int(spec.causal),
        window=window,
        window_right=max(window - 1, 0) if spec.window_right is None else spec.window_right,
        chunk=chunk,
        lookback=lookback,
        spans={None: 0, "override_window": 1, "within_window": 2}[spec.mm_prefix],
        rswa=spec.rswa_window or 0,
        alibi={None: 0, "linear": 1, "sqrt": 2}[spec.alibi],
        softcap=spec.softcap or 0.0,
        scale_by_head=spec.kv_scale == "head",
        fp8_native=native,
    )


def _spans(batch: Batch) -> tuple[list[int], list[list[int]], bool]:
    """Row starts into a flat list of ``[start, end, group]``, and whether any span has a group."""
    starts, flat, grouped = [0], [], False
    for row in range(batch.num_seqs):
        numbers: dict[int, int] = {}
        for start, end, group in batch.spans(row):
            grouped |= group is not None
            flat.append([start, end, -1 if group is None else numbers.setdefault(group, len(numbers))])
        starts.append(len(flat))
    return starts, flat, grouped


def _table(rows: Sequence[tuple[int, ...]], held: int, width: int, before: Tensor | None, device: torch.device) -> Tensor:
    """Rows as int32 ``[held, width]``, the rest marked empty; into ``before`` where a graph may hold that."""
    if len(rows) > held:
        raise ValueError(f"the step needs {len(rows)} work items, the plan holds {held}: make a new plan, or raise the limits")
    host = torch.full((held, width), -1, dtype=torch.int32)
    if rows:
        host[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    if device.type != "cpu":
        host = host.pin_memory()
    return host.to(device, non_blocking=True) if before is None else before.copy_(host, non_blocking=True)


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).gpu_subslice_count)
    return 1  # the interpreter runs programs one after another
