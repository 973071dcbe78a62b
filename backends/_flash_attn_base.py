"""The adapter that both FlashAttention backends share; each adds its kernel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attnmux.backends._flash_attn_run import add_sinks, capturing, current_stream, is_aligned, paged, store_lse, wait_for_readers, wait_for_tensors
from attnmux.backends._flash_attn_step import Step, columns_for, longest_query, step_of
from attnmux.dispatch.backend import Backend, LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.device import Device
from attnmux.dispatch.spec import AttentionSpec


class FlashAttnBackend(Backend):
    """Without limits a step's tensors may be the batch's own, cut to the batch. Within limits they are its own, as large as the limits may
    need, and refreshed in place, for graphs; then the kernels get all of ``q``, since a replay may have more tokens than the capture.
    """

    option_names = ()

    def __init__(self, spec: AttentionSpec, device: Device, options: Mapping[str, Any]) -> None:
        super().__init__(spec, device, options)
        self._torch_device = torch.device(device.torch_device)
        left = -1 if spec.sliding_window is None else spec.sliding_window - 1
        right = 0 if spec.causal else left if spec.window_right is None else spec.window_right
        self._window = left, right
        """Keys to the left and to the right that a token sees; -1: all."""

    @abstractmethod
    def _extend(self, step: Step, batch: Batch) -> None:
        """Set ``step.extra`` from the step's own tensors: in place where it is set already."""

    @abstractmethod
    def _takes_sinks(self, sinks: Tensor) -> bool:
        """Whether the kernel adds these sinks itself."""

    @abstractmethod
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, step: Step, out: Tensor, sinks: Tensor | None, wants_lse: bool, own: bool
    ) -> Tensor | None:
        """Launch the kernel into an aligned ``out``; returns its log-sum-exp ``[Hq, tokens]``.

        Args:
            table: the step's, or its short form.
            sinks: only those that :meth:`_takes_sinks` approved.
            own: whether this is the plan's stream and the table is the step's.
        """

    def plan(self, batch: Batch, workspace: Tensor | None, previous: Any) -> Step:
        earlier: Step | None = previous if self.limits is not None else None  # without limits nothing is captured
        raw, stream = current_stream(self._torch_device)
        most = earlier.max_query_len if earlier else longest_query(self.spec, batch, self.limits)
        longest = self.limits.max_seq_len if self.limits else batch.longest_keys
        columns = columns_for(self.spec, longest, most)
        step = step_of(self.spec, batch, most, columns)
        if earlier is not None:
            wait_for_readers(earlier, raw, stream)
            earlier.refill(step)
            step = earlier
        elif self.limits is not None:
            step = step.owned(columns)
        self._extend(step, batch)
        step.raw_stream, step.stream, step.used = raw, stream, {}
        if stream is not None and not capturing(self._torch_device):
            step.ready = step.ready or torch.cuda.Event()  # type: ignore[no-untyped-call]
            step.ready.record(stream)
        return step

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, state: Step, out: Tensor, lse: Tensor | None, layer: LayerArgs) -> None:
        live = None
        if self.limits is None:
            q, out, lse = q[: state.tokens], out[: state.tokens], None if lse is None else lse[: state.tokens]
        if q.shape[0] == 0 or state.lens.shape[0] == 0:
            return
        k, v = paged("k_cache", k_cache, self.spec), paged("v_cache", v_cache, self.spec)
        raw, stream = current_stream(self._torch_device)
        foreign = raw != state.raw_stream
        if foreign:
            wait_for_tensors(state, stream)
        with self._on_device():
            sinks = layer.sinks if layer.sinks is not None and self._takes_sinks(layer.sinks) else None
            added = layer.sinks is not None and sinks is None
            if self.limits is not None and (added or lse is not None):
                live = torch.arange(q.shape[0], device=q.device) < state.starts[-1]
            target = out if is_aligned(out) else out.clone(memory_format=torch.contiguous_format)  # a copy keeps what is padding
            table = state.table if state.short is None or k.shape[1] > 1 else state.short
            own = not foreign and table is state.table
            q = q if is_aligned(q) else q.clone(memory_format=torch.contiguous_format)
            found = self._attend(q, k, v, table, state, target, sinks, lse is not None or added, own)
            if added and found is not None and layer.sinks is not None:
                found = add_sinks(target, found, layer.sinks, live)
            if target is not out:
                out.copy_(target)
            if lse is not None and found is not None:
                store_lse(lse, found, live)
        if foreign and stream is not None and not capturing(self._torch_device):
            state.used[raw] = stream.record_event()

    def _on_device(self) -> AbstractContextManager[Any]:
        """Launches follow the tensors' device."""
        index = self._torch_device.index
        if self._torch_device.type != "cuda" or index is None or index == torch.cuda.current_device():
            return nullcontext()
        return torch.cuda.device(index)
