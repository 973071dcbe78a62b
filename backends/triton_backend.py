"""The adapter to our own Triton kernels: a spec becomes kernel constants, a batch becomes work items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnmux.backends._triton_step import State, features_of, kept, multiprocessors, rows_of
from attnmux.backends._triton_tiles import Tiles
from attnmux.backends._triton_warmup import SPANS, layers, one_row, pools
from attnmux.dispatch.backend import Backend, LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.device import Device
from attnmux.dispatch.errors import ConfigError, complaint
from attnmux.dispatch.spec import AttentionSpec, Limits
from attnmux.kernels.triton import launch
from attnmux.kernels.triton.config import LaunchConfig

MOST_PROGRAMS = 1 << 16


class TritonBackend(Backend):
    """Options: ``programs``, how many programs a launch is cut into (default: by kind of row, a few for each multiprocessor)."""

    option_names = ("programs",)

    def __init__(self, spec: AttentionSpec, device: Device, options: Mapping[str, Any]) -> None:
        super().__init__(spec, device, options)
        self._torch_device = torch.device(device.torch_device)
        self._programs = options.get("programs")
        if self._programs is not None and (type(self._programs) is not int or not 1 <= self._programs <= MOST_PROGRAMS):
            raise ConfigError(complaint("programs in the options of triton", repr(self._programs), f"a whole number from 1 to {MOST_PROGRAMS}"))
        self._tiles = Tiles(spec, device, multiprocessors(self._torch_device), self._programs)
        self._features = features_of(spec, device)
        self._scales: dict[float, Tensor] = {}
        self._writes: launch.Held = {}
        self._owner: Any = None  # the stream that the workspace belongs to

    def workspace_bytes(self, limits: Limits) -> int:
        tiles = self._tiles
        return max(4 * tiles.slot_floats(tiles.room_within(kind, config, limits).slots, config) for kind, config in tiles.reachable(limits))

    def warmup(self, limits: Limits) -> None:
        """Compile what the limits can reach: each tile shape, with each form of spans, cut and not."""
        for (kind, _), length in self._tiles.reachable(limits).items():
            for span in SPANS if self.spec.mm_prefix else SPANS[:1]:
                self._run_once(kind, length, span, limits)

    def plan(self, batch: Batch, workspace: Tensor | None, previous: Any) -> State:
        return self._plan(batch, self._tiles.kinds(batch), workspace, previous)

    def _plan(self, batch: Batch, kinds: Mapping[str, int], workspace: Tensor | None, previous: Any) -> State:
        """With these launches, each for a longest row of so many query tokens."""
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
        for kind, longest in kinds.items():
            if kind not in work:
                work[kind] = self._work(kind, longest, batch, workspace if stream == self._owner else None)
        lens = launch.Lengths(batch.num_seqs, batch.query_start_loc.contiguous(), batch.seq_lens.contiguous())
        for each in work.values():
            launch.plan(given, lens, each, self._features, self.spec.group, self._launch_on(raw))
        rows = kept(given, earlier.rows if earlier else None, self.limits, self.spec.page_size or 1)
        now = graph = {kind: work[kind] for kind in kinds}
        if len(work) > len(now):
            of_class = {each.lens: kind for kind, each in work.items()} | {each.lens: kind for kind, each in now.items()}
            graph = {kind: work[kind] for kind in of_class.values()}
        if stream is None or capturing:  # what a graph records is no event for anyone else
            return State(rows, work, now, graph, raw, stream, earlier.ready if earlier else None)
        ready = earlier.ready if earlier and earlier.ready else torch.get_device_module(self._torch_device).Event()
        ready.record(stream)
        return State(rows, work, now, graph, raw, stream, ready)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, state: State, out: Tensor, lse: Tensor | None, layer: LayerArgs) -> None:
        k, v, inputs, raw = self._nhd(k_cache), self._nhd(v_cache), self._inputs(layer), self._raw_stream()
        if raw == state.raw_stream:
            for kind, work in self._launched(state).items():
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
        for work in self._launched(state).values():  # the workspace belongs to the plan's stream
            slot_out, slot_lse = self._slots(work.slot_lse.shape[0], work.config, None)
            foreign = replace(work, slot_out=slot_out, slot_lse=slot_lse)
            launch.attend(q, k, v, out, lse, state.rows, foreign, self._features, inputs, self._launch_on(raw))
        if not capturing:
            state.used[raw] = stream.record_event()

    def _launched(self, state: State) -> dict[str, launch.Work]:
        return state.graph if state.graph is not state.now and launch.capturing(self._torch_device) else state.now

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, layer: LayerArgs) -> None:
        caches, scales = (self._nhd(k_cache), self._nhd(v_cache)), (self._scale(layer.k_scale), self._scale(layer.v_scale))
        stream = self._launch_on(self._raw_stream())
        launch.store((k, v), caches, slot_mapping.contiguous(), scales, self._features, self._writes, stream)

    def _nhd(self, cache: Tensor) -> Tensor:
        return cache.transpose(1, 2) if self.spec.page_size is not None and self.spec.kv_layout == "HND" else cache

    def _run_once(self, kind: str, length: int, span: tuple[int, ...], limits: Limits) -> None:
        """One row of so many query tokens, so that the kernels it needs are compiled."""
        spec, device, owner = self.spec, self._torch_device, self._owner
        keys = min(limits.max_seq_len, max(length, 4 * self._tiles.config(kind, length).block_n))  # enough to be cut
        state = self._plan(one_row(spec, device, length, keys, span), {kind: length}, None, None)
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
        config = self._tiles.config(kind, longest)
        room = self._tiles.room(kind, config, self.limits, batch)
        tables = room.tables(self.limits.max_num_seqs if self.limits else batch.num_seqs, self._torch_device)
        slot_out, slot_lse = self._slots(room.slots, config, workspace)
        lens = self._tiles.lengths[kind]
        return launch.Work(lens, slot_out=slot_out, slot_lse=slot_lse, config=config, room=room.at_once, cut_tiles=room.cut_tiles, **tables)

    def _slots(self, slots: int, config: LaunchConfig, workspace: Tensor | None) -> tuple[Tensor, Tensor]:
        """Partial states, in the workspace where it is ours and large enough."""
        size = self._tiles.slot_floats(slots, config)
        if workspace is None or self.limits is None or workspace.numel() < 4 * size:
            return self._tiles.slots(slots, config, torch.empty(size, dtype=torch.float32, device=self._torch_device))
        return self._tiles.slots(slots, config, workspace[: size * 4].view(torch.float32))

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
