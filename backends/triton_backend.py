"""The adapter to our own Triton kernels: a spec becomes kernel constants, a batch becomes work items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnmux.backends._triton_step import Room, State, features_of, kept, multiprocessors, room_for, rows_of
from attnmux.backends._triton_warmup import SPANS, layers, one_row, pools
from attnmux.dispatch.backend import Backend, LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.device import Device
from attnmux.dispatch.errors import ConfigError, complaint
from attnmux.dispatch.spec import MAX_DECODE_TOKENS, AttentionSpec, Limits
from attnmux.kernels.triton import launch
from attnmux.kernels.triton.config import LaunchConfig, Target, launch_config

INVARIANT_CUT_KEYS = 2048
"""Keys a part has in decode under ``batch_invariant``."""
MOST_PROGRAMS = 1 << 16
WHOLE = 1 << 30
"""More tiles than a row has."""


class TritonBackend(Backend):
    """Options: ``programs``, how many programs a launch is cut into (default: by kind of row, a few for each multiprocessor)."""

    option_names = ("programs",)

    def __init__(self, spec: AttentionSpec, device: Device, options: Mapping[str, Any]) -> None:
        super().__init__(spec, device, options)
        self._torch_device = torch.device(device.torch_device)
        self._programs = options.get("programs")
        if self._programs is not None and (type(self._programs) is not int or not 1 <= self._programs <= MOST_PROGRAMS):
            raise ConfigError(complaint("programs in the options of triton", repr(self._programs), f"a whole number from 1 to {MOST_PROGRAMS}"))
        self._multiprocessors = multiprocessors(self._torch_device)
        self._target = Target(device.type, device.arch, device.shared_memory, "tma" in device.features)
        self._features = features_of(spec, device)
        self._configs: dict[tuple[str, int], LaunchConfig] = {}
        self._scales: dict[float, Tensor] = {}
        self._writes: launch.Held = {}
        self._owner: Any = None  # the stream that the workspace belongs to

    def workspace_bytes(self, limits: Limits) -> int:
        shapes = self._reachable(limits)
        return max(4 * self._slot_floats(self._room_within(kind, config, limits).slots, config) for kind, config in shapes)

    def warmup(self, limits: Limits) -> None:
        """Compile what the limits can reach: each tile shape, with each form of spans, cut and not."""
        for length in self._reachable(limits).values():
            for span in SPANS if self.spec.mm_prefix else SPANS[:1]:
                self._run_once(length, span, limits)

    def plan(self, batch: Batch, workspace: Tensor | None, previous: Any) -> State:
        earlier: State | None = None if self.limits is None else previous  # without limits nothing is captured, and tables grow
        raw, capturing = self._raw_stream(), launch.capturing(self._torch_device)
        stream = earlier.stream if earlier is not None and earlier.raw_stream == raw else self._stream()
        if earlier is not None and stream is not None and not capturing:  # what still reads the tables must end before they change
            if earlier.raw_stream != raw:
                stream.wait_stream(earlier.stream)
            for event in earlier.used.values():
                stream.wait_event(event)
        self._owner = self._owner or stream
        given, work = rows_of(self.spec, batch, self._torch_device), dict(earlier.work) if earlier else {}
        for kind, longest in self._longest(batch).items():
            if kind not in work:
                work[kind] = self._work(kind, longest, batch, workspace if stream == self._owner else None)
        lens = launch.Lengths(batch.num_seqs, batch.query_start_loc.contiguous(), batch.seq_lens.contiguous())
        for each in work.values():
            launch.plan(given, lens, each, self._features, self.spec.group, self._launch_on(raw))
        rows = kept(given, earlier.rows if earlier else None, self.limits, self.spec.page_size or 1)
        if stream is None or capturing:  # what a graph records is no event for anyone else
            return State(rows, work, raw, stream, earlier.ready if earlier else None)
        ready = earlier.ready if earlier and earlier.ready else torch.get_device_module(self._torch_device).Event()
        ready.record(stream)
        return State(rows, work, raw, stream, ready)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, state: State, out: Tensor, lse: Tensor | None, layer: LayerArgs) -> None:
        k, v, inputs, raw = self._nhd(k_cache), self._nhd(v_cache), self._inputs(layer), self._raw_stream()
        if raw == state.raw_stream:
            for kind, work in state.work.items():
                key = kind, layer.form, inputs.form()  # whoever changed the inputs may have left the form
                known = state.known.get(key, ())
                found = launch.attend(q, k, v, out, lse, state.rows, work, self._features, inputs, self._launch_on(raw), known)
                if found and not known and layer.form is not None:
                    state.known[key] = found
            return
        stream, capturing = self._stream(), launch.capturing(self._torch_device)
        if not capturing:
            if state.ready is not None:
                stream.wait_event(state.ready)
            for tensor in state.tensors():
                tensor.record_stream(stream)
        for work in state.work.values():  # the workspace belongs to the plan's stream
            slot_out, slot_lse = self._slots(work.slot_lse.shape[0], work.config, None)
            foreign = replace(work, slot_out=slot_out, slot_lse=slot_lse)
            launch.attend(q, k, v, out, lse, state.rows, foreign, self._features, inputs, self._launch_on(raw))
        if not capturing:
            state.used[raw] = stream.record_event()

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, layer: LayerArgs) -> None:
        caches, scales = (self._nhd(k_cache), self._nhd(v_cache)), (self._scale(layer.k_scale), self._scale(layer.v_scale))
        stream = self._launch_on(self._raw_stream())
        launch.store((k, v), caches, slot_mapping.contiguous(), scales, self._features, self._writes, stream)

    def _nhd(self, cache: Tensor) -> Tensor:
        return cache.transpose(1, 2) if self.spec.page_size is not None and self.spec.kv_layout == "HND" else cache

    def _kind(self, query_len: int) -> str:
        return "decode" if query_len <= MAX_DECODE_TOKENS and self.spec.attn_type != "encoder_only" else "prefill"

    def _longest(self, batch: Batch) -> dict[str, int]:
        """Kinds of launches that a batch needs, each with its longest row."""
        top = batch.longest_query
        if top and self._kind(top) == "decode":
            return {"decode": top}
        found = {"prefill": top} if top else {}
        few = max((n for n in batch.query_lens if n <= MAX_DECODE_TOKENS), default=0)
        return found | ({self._kind(few): max(few, found.get(self._kind(few), 0))} if few else {})

    def _reachable(self, limits: Limits) -> dict[tuple[str, LaunchConfig], int]:
        """Every launch that batches within the limits can need, with a query length that leads to it. Longer rows are all alike."""
        longest = limits.max_query_len if self.spec.attn_type == "cross" else min(limits.max_query_len, limits.max_seq_len)
        lengths = range(1, min(longest, MAX_DECODE_TOKENS + 1) + 1)
        return {(self._kind(n), self._config(self._kind(n), n)): n for n in lengths}

    def _run_once(self, length: int, span: tuple[int, ...], limits: Limits) -> None:
        """One row of so many query tokens, so that the kernels it needs are compiled."""
        spec, device, owner = self.spec, self._torch_device, self._owner
        keys = min(limits.max_seq_len, max(length, 4 * self._config(self._kind(length), length).block_n))  # enough to be cut
        state = self.plan(one_row(spec, device, length, keys, span), None, None)
        self._owner = owner  # who compiles need not be who serves
        q = torch.zeros((length, spec.num_q_heads, spec.head_size), dtype=spec.dtype, device=device).to(spec.q_dtype)
        out = torch.empty((length, spec.num_q_heads, spec.v_head_size), dtype=spec.dtype, device=device)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=device) if spec.return_lse else None
        k, v = pools(spec, device, keys)
        new_k, new_v = (torch.zeros((1, spec.num_kv_heads, size), dtype=spec.dtype, device=device) for size in (spec.head_size, spec.v_head_size))
        for layer in layers(spec, device):
            self.run(q, k, v, state, out, lse, layer)
            self.write_kv(new_k, new_v, k, v, torch.full((1,), -1, dtype=torch.int64, device=device), layer)

    def _work(self, kind: str, longest: int, batch: Batch, workspace: Tensor | None) -> launch.Work:
        config = self._config(kind, longest)
        if self.limits is None:
            block_q = config.block_m // self.spec.group
            blocks = sum(-(-n // block_q) for n in batch.query_lens if n and self._kind(n) == kind)
            room = self._room(kind, config, blocks, batch.longest_keys)
        else:
            room = self._room_within(kind, config, self.limits)
        lens = (
            1 if self.spec.attn_type == "encoder_only" or kind == "decode" else MAX_DECODE_TOKENS + 1,
            MAX_DECODE_TOKENS if kind == "decode" else 2**31 - 1,
        )
        tables = room.tables(self.limits.max_num_seqs if self.limits else batch.num_seqs, self._torch_device)
        slot_out, slot_lse = self._slots(room.slots, config, workspace)
        return launch.Work(lens, slot_out=slot_out, slot_lse=slot_lse, config=config, room=room.at_once, cut_tiles=room.cut_tiles, **tables)

    def _config(self, kind: str, max_query_len: int) -> LaunchConfig:
        spec = self.spec
        # longer rows are all alike, and the tile of an invariant row must not depend on its neighbours
        max_query_len = MAX_DECODE_TOKENS if spec.batch_invariant else min(max_query_len, MAX_DECODE_TOKENS + 1)
        found = self._configs.get((kind, max_query_len))
        if found is None:
            sizes = (spec.group, spec.head_size, spec.v_head_size, spec.dtype.itemsize, spec.kv_dtype.itemsize, spec.page_size or 0)
            found = launch_config(self._target, kind == "decode", max_query_len, *sizes)
            if found is None:
                raise ValueError(complaint("head_size", spec.head_size, f"a tile that fits {self._target.shared_memory} bytes of shared memory"))
            self._configs[kind, max_query_len] = found
        return found

    def _room(self, kind: str, config: LaunchConfig, blocks: int, longest: int) -> Room:
        """Room for so many Q blocks that see at most so many keys."""
        programs = self._programs or config.programs * self._multiprocessors
        cut = 0
        if self.spec.batch_invariant:
            cut = max(1, INVARIANT_CUT_KEYS // config.block_n) if kind == "decode" else WHOLE
        return room_for(blocks, -(-longest // config.block_n), programs, self.spec.num_kv_heads, cut)

    def _room_within(self, kind: str, config: LaunchConfig, limits: Limits) -> Room:
        block_q = config.block_m // self.spec.group
        longest = min(limits.max_query_len, MAX_DECODE_TOKENS) if kind == "decode" else limits.max_query_len
        blocks = min(limits.max_num_seqs * -(-longest // block_q), limits.max_num_seqs + limits.max_num_tokens // block_q)
        return self._room(kind, config, blocks, limits.max_seq_len)

    def _slot_floats(self, slots: int, config: LaunchConfig) -> int:
        return slots * self.spec.num_kv_heads * config.block_m * (self.spec.v_head_size + 1)

    def _slots(self, slots: int, config: LaunchConfig, workspace: Tensor | None) -> tuple[Tensor, Tensor]:
        """Partial states, in the workspace where it is ours and large enough."""
        shape, size = (slots, self.spec.num_kv_heads, config.block_m), self._slot_floats(slots, config)
        if workspace is None or self.limits is None or workspace.numel() < 4 * size:
            flat = torch.empty(size, dtype=torch.float32, device=self._torch_device)
        else:
            flat = workspace[: size * 4].view(torch.float32)
        lses = slots * shape[1] * shape[2]
        return flat[lses:].view(*shape, self.spec.v_head_size), flat[:lses].view(shape)

    def _raw_stream(self) -> int:
        """The current stream as a number, which is had sooner than the object."""
        if self._torch_device.type == "cuda":
            return int(torch._C._cuda_getCurrentRawStream(self._torch_device.index))
        return 0 if self._torch_device.type == "cpu" else int(self._stream().stream_id)

    def _stream(self) -> Any:
        if self._torch_device.type == "cpu":
            return None
        return torch.get_device_module(self._torch_device).current_stream(self._torch_device)

    def _launch_on(self, raw: int) -> int | None:
        """The stream as Triton takes it: elsewhere it is not the number that streams are told apart by."""
        return raw if self._torch_device.type == "cuda" else None

    def _inputs(self, layer: LayerArgs) -> launch.Layer:
        sinks, slopes, q_scale, k_scale, v_scale, _ = layer
        if q_scale is None and self.spec.q_dtype != self.spec.dtype:
            q_scale = 1.0
        slopes = None if slopes is None else slopes.contiguous()
        return launch.Layer(self._sinks(sinks), slopes, self._scale(q_scale), self._scale(k_scale), self._scale(v_scale))

    def _sinks(self, sinks: Tensor | None) -> Tensor | None:
        """Side by side, and in a dtype for which kernels were compiled ahead."""
        if sinks is None:
            return None
        return sinks.contiguous() if sinks.dtype in (torch.float32, self.spec.dtype) else sinks.float().contiguous()

    def _scale(self, scale: Tensor | float | None) -> Tensor | None:
        if scale is None or isinstance(scale, Tensor):
            return None if scale is None else scale.reshape(-1).contiguous()
        held = self._scales.get(scale)
        if held is None:
            held = torch.full((1,), scale, dtype=torch.float32, device=self._torch_device)
            if not launch.capturing(self._torch_device):  # what a graph fills holds nothing until it is replayed
                self._scales[scale] = held
        return held
