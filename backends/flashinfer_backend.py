"""The adapter to FlashInfer: rows of a step to launches of its paged prefill wrapper, or of NVIDIA's kernels on Blackwell.

The prefill wrapper takes rows of any length, so decode rows too: the decode wrapper's own kernel wants one token a row and pays off where
query heads share no KV head; its form for tensor cores is this wrapper's kernel, without a natural log-sum-exp.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnmux.backends import _flashinfer_blackwell as blackwell
from attnmux.backends._flashinfer_lane import Captured, Lane, Pool, Work
from attnmux.backends._flashinfer_launch import LN2, Launch, check_caches, layer_arguments
from attnmux.backends._flashinfer_modules import FA3_QUERY_LEN, Module, kernels_for, module_for, options_of, reachable
from attnmux.backends._flashinfer_pages import key_families, page_indices, pages_of, shares_sight, token_ranges
from attnmux.backends._flashinfer_schedule import Scheduler, captured_tokens, ceil_div, int_bytes
from attnmux.backends._flashinfer_warmup import warm_up
from attnmux.dispatch.backend import Backend, LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.device import Device
from attnmux.dispatch.errors import complaint
from attnmux.dispatch.rows import classify, group_rows
from attnmux.dispatch.spec import MAX_DECODE_TOKENS, AttentionSpec, Limits


class State:
    """A planned step. When it dies its lanes go back to the pool."""

    def __init__(self, launches: Sequence[Launch], stream: Any) -> None:
        self.launches, self.stream = tuple(launches), stream

    def lanes(self) -> list[Lane]:
        return [lane for launch in self.launches for lane in launch.lanes()]


class FlashInferBackend(Backend):
    """Options: ``kernel`` and ``cuda_graphs``, see :class:`~attnmux.backends._flashinfer_modules.Options`."""

    option_names = ("kernel", "cuda_graphs")

    def __init__(self, spec: AttentionSpec, device: Device, options: Mapping[str, Any]) -> None:
        super().__init__(spec, device, options)
        self._options = options_of(options, spec, device)
        self._torch_device = torch.device(device.torch_device)
        self._able = kernels_for(spec, device)
        self._vendor = blackwell.choose(self._able, self._options.kernel)  # for steps without spans
        self._scheduler = Scheduler(spec, int(torch.cuda.get_device_properties(self._torch_device).multi_processor_count))
        self._pool = Pool()
        self._scales: dict[float, Tensor] = {}
        self._owner: Any = None  # the stream that the workspace belongs to

    def workspace_bytes(self, limits: Limits) -> int:
        """Room for whatever FlashInfer's plans may ask for; NVIDIA's kernels take a fixed size, which they recommend."""
        vendor = blackwell.WORKSPACE_BYTES if self._vendor else 0
        captured = self._scheduler.captured_scratch(limits) if self._options.cuda_graphs and self.spec.attn_type != "encoder_only" else 0
        return max(vendor, self._scheduler.stock_scratch(), captured)

    def plan_workspace_bytes(self, batch: Batch) -> int:
        if self._takes(batch):
            return blackwell.WORKSPACE_BYTES
        cut = self._cut(batch)
        return max(self._scheduler.stock_scratch(), cut[1] if cut else 0)

    def warmup(self, limits: Limits) -> None:
        """Build every module that the spec needs, side by side, and run each of them once."""
        owner = self._owner
        warm_up(self, reachable(self.spec, self.device, self._options), limits, self._torch_device)
        self._owner = owner  # who compiles need not be who serves

    def plan(self, batch: Batch, workspace: Tensor | None, previous: Any) -> Any:
        """Schedules on the host from exact lengths, and gathers page ids on the device.

        Raises:
            RuntimeError: a CUDA graph is being captured: it would hold this step's lengths for good.
            ValueError: host lengths are upper bounds, and the chosen kernel is scheduled from exact ones.
        """
        with torch.inference_mode(False), torch.no_grad():  # a refresh may come in another mode, and writes into what is made here
            if self._vendor and self._takes(batch):
                return blackwell.plan(self.spec, self._vendor, batch, workspace, previous, self.limits)
            return self._plan(batch, workspace, previous)

    def _plan(self, batch: Batch, workspace: Tensor | None, previous: Any) -> State:
        if batch.lengths != "exact":  # claimed for trtllm-gen only, which an option may have turned off
            raise ValueError(complaint("lengths", repr(batch.lengths), "'exact'", f"kernel = {self._options.kernel!r} schedules on the host"))
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("FlashInfer plans on the host, so a CUDA graph cannot hold a plan: plan first, capture the run, refresh with into=")
        stream = torch.cuda.current_stream(self._torch_device)
        self._owner = self._owner or stream
        scratch = workspace if workspace is not None and stream == self._owner else self._scratch_for(batch)
        old = list(previous.launches) if isinstance(previous, State) and self.limits is not None else []
        state, holder = State(self._launches(batch, scratch, old), stream), object()
        for lane in state.lanes():
            lane.holder = holder
        weakref.finalize(state, _hand_back, self._pool, state.launches, holder).atexit = False
        return state

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, state: Any, out: Tensor, lse: Tensor | None, layer: LayerArgs) -> None:
        if self.spec.page_size is None:  # packed keys are pages of one
            k_cache, v_cache = k_cache.unsqueeze(1), v_cache.unsqueeze(1)
        check_caches(k_cache, v_cache)
        if not isinstance(state, State):
            assert self._vendor is not None
            blackwell.run(self.spec, self._vendor, q, k_cache, v_cache, state, out, layer)
            return
        stream = torch.cuda.current_stream(self._torch_device)
        fused = self.spec.kv_scale is None  # scales are read before a kernel waits for the one in front of it
        for launch in state.launches:
            arguments = layer_arguments(self.spec, launch.lane, layer, self._scale)

            def call(launch: Launch = launch, arguments: Sequence[Any] = arguments) -> None:
                launch.run(q, (k_cache, v_cache), out, lse, arguments, fused)

            if stream == state.stream:
                call()
            else:
                self._elsewhere(launch, stream, call)

    def _elsewhere(self, launch: Launch, stream: Any, call: Callable[[], None]) -> None:
        scratch = torch.empty(launch.scratch, dtype=torch.uint8, device=self._torch_device)
        if not torch.cuda.is_current_stream_capturing():
            for tensor in launch.tensors():
                tensor.record_stream(stream)
        launch.lane.run_elsewhere(stream, scratch, call)

    def _takes(self, batch: Batch) -> bool:
        """Whether NVIDIA's kernels run the step: they know no spans."""
        return self._vendor is not None and "image" not in classify(self.spec, batch)

    def _launches(self, batch: Batch, scratch: Tensor, old: list[Launch]) -> list[Launch]:
        """One launch a kind of rows, so that text pays for no span and short rows for no long one."""
        longest = batch.longest_query
        if self._graphs() and longest <= MAX_DECODE_TOKENS and all(c in (None, "decode") for c in classify(self.spec, batch)):
            return self._captured(batch, scratch, longest, old)
        groups = group_rows(self._kinds(batch), batch.query_lens)
        if any(group.backend == "fa3" and group.tokens is None for group in groups):  # fa3 gains less than the copies of its rows cost
            groups = group_rows([kind and kind.replace("fa3", "fa2") for kind in self._kinds(batch)], batch.query_lens)
        starts = torch.tensor([0, *batch.query_lens]).cumsum(0).tolist()
        launches = []
        for group in groups:
            rows, index = batch if len(group.rows) == batch.num_seqs else batch.take(group.rows), None
            if group.tokens is None:
                tokens = torch.cat([torch.arange(starts[r], starts[r + 1]) for r in group.rows])
                index = tokens.to(self._torch_device, non_blocking=True)
            launches.append(self._launch(group.backend, rows, scratch, group.tokens, index, old))
        return launches

    def _kinds(self, batch: Batch) -> list[str | None]:
        """The kind of each row, ``None`` for rows without query tokens."""
        kinds: list[str | None] = []
        fixed = self._options.kernel
        for row, (row_class, q_len) in enumerate(zip(classify(self.spec, batch), batch.query_lens, strict=True)):
            if row_class == "image":
                kinds.append("families" if shares_sight(batch.spans(row)) else "ranges")
            elif row_class is None:
                kinds.append(None)
            else:
                long = "fa3" in self._able and (fixed == "fa3" or (fixed == "auto" and q_len >= FA3_QUERY_LEN))
                kinds.append("fa3" if long else "fa2")
        return kinds

    def _launch(self, kind: str, rows: Batch, scratch: Tensor, tokens: tuple[int, int] | None, index: Tensor | None, old: list[Launch]) -> Launch:
        module, pages = module_for(self.spec, kind), pages_of(self.spec, rows)
        lane, _ = self._lane(module, None, old)
        cut = self._cut(rows) if kind == "fa2" else None
        split = cut[0] if cut and cut[1] <= scratch.numel() else None
        seqs, total = rows.num_seqs, rows.num_tokens
        # fa3 lists every head's tiles, seven numbers each; fa2 has a tile for each 16 or more rows of queries, and as many parts as there is room
        tiles = 4 * (total // 64 + seqs) * self.spec.num_q_heads if kind == "fa3" else self._tiles(rows, pages.lens, split)
        lane.plan(Work(rows.query_lens, pages, page_indices(rows, pages), split, int_bytes(seqs, total, tiles)), scratch)
        extra: tuple[Tensor, ...] = ()
        if module.kind == "ranges":
            extra = (token_ranges(rows, pages).to(self._torch_device, non_blocking=True),)
        elif module.variant.families:
            families, first = key_families(rows, pages)
            extra = (families.to(self._torch_device, non_blocking=True), first.to(self._torch_device, non_blocking=True))
        twin = (lambda: self._launch("fa2", rows, self._scratch_for(rows), tokens, index, [])) if kind == "fa3" else None
        lane.filled()
        need = 256 if kind == "fa3" else cut[1] if cut and split is not None else self._scheduler.stock_scratch()
        return Launch(lane, total, tokens, need, index, extra, twin=twin)

    def _captured(self, batch: Batch, scratch: Tensor, longest: int, old: list[Launch]) -> list[Launch]:
        """Decode rows in a launch of one shape, padding rows included, whose buffers later steps fill anew."""
        assert self.limits is not None
        module, pages = module_for(self.spec, "fa2"), pages_of(self.spec, batch)
        shape = next((launch.lane.graph for launch in old if launch.lane.graph is not None), None)
        if shape is None:
            if not longest:
                return []
            seqs, columns = batch.num_seqs, ceil_div(self.limits.max_seq_len, self.spec.page_size or 1)
            shape = Captured(seqs, captured_tokens(seqs, longest, self.limits), seqs * columns)
        lane, before = self._lane(module, shape, old)
        if before is not None:  # a graph may hold its address
            scratch = lane.wrapper._float_workspace_buffer
        tiles, tile = self._scheduler.captured_tiles(shape.seqs, shape.tokens)
        room = int_bytes(shape.seqs, shape.tokens, tiles)
        lane.plan(Work(batch.query_lens, pages, page_indices(batch, pages), None, room), scratch)
        factor = None
        if self.spec.return_lse:
            factor = torch.full((shape.tokens, 1), 1.0)
            factor[: batch.num_tokens] = LN2
            held = before.lse_factor if before is not None else None
            factor = factor.to(self._torch_device, non_blocking=True) if held is None else held.copy_(factor, non_blocking=True)
        lane.filled()
        return [Launch(lane, batch.num_tokens, (0, batch.num_tokens), self._scheduler.scratch(tiles, tile), lse_factor=factor)]

    def _lane(self, module: Module, shape: Captured | None, old: list[Launch]) -> tuple[Lane, Launch | None]:
        """A lane of that shape: that of an earlier launch of the same plan, which is returned too, a free one, or a new one."""
        for i, launch in enumerate(old):
            if launch.lane.module == module and launch.lane.graph == shape:
                return launch.lane, old.pop(i)
        return self._pool.take(module, shape) or Lane(self.spec, module, self._torch_device, shape), None

    def _graphs(self) -> bool:
        return self.limits is not None and self._options.cuda_graphs and self.spec.attn_type != "encoder_only"

    def _cut(self, rows: Batch) -> tuple[int, int] | None:
        pages = pages_of(self.spec, rows)
        counts = [b - a for a, b in zip(pages.indptr, pages.indptr[1:], strict=False)]
        window = -1 if self.spec.sliding_window is None else self.spec.sliding_window - 1
        return self._scheduler.cut(rows.query_lens, counts, pages.size, window)

    def _tiles(self, rows: Batch, lens: Sequence[int], split: int | None) -> int:
        tiles = [ceil_div(n * self.spec.group, 16) for n in rows.query_lens]
        if split is None:
            return max(self._scheduler.slots, sum(tiles))
        part = split * (self.spec.page_size or 1)
        return sum(t * ceil_div(max(n, 1), part) for t, n in zip(tiles, lens, strict=True))

    def _scratch_for(self, batch: Batch) -> Tensor:
        limits = 0 if self.limits is None else self.workspace_bytes(self.limits)
        return torch.empty(max(limits, self.plan_workspace_bytes(batch)), dtype=torch.uint8, device=self._torch_device)

    def _scale(self, scale: Tensor | float | None) -> Tensor:
        """A scale on the device. What a graph fills holds nothing until it is replayed, so it is not kept."""
        if isinstance(scale, Tensor):
            return scale.reshape(1).contiguous()
        number = 1.0 if scale is None else float(scale)
        held = self._scales.get(number)
        if held is None:
            held = torch.full((1,), number, dtype=torch.float32, device=self._torch_device)
            if not torch.cuda.is_current_stream_capturing():
                self._scales[number] = held
        return held


def _hand_back(pool: Pool, launches: Sequence[Launch], holder: object) -> None:
    """Lanes of a dead state, but those that a later state of the same plan took over. Twins have no holder, and are this state's."""
    pool.give([lane for launch in launches for lane in launch.lanes() if lane.holder in (None, holder)])
