"""The adapter of FlashAttention-3, at the level of its operator, which takes ``out``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmux.backends._flash_attn_base import FlashAttnBackend
from attnmux.backends._flash_attn_step import PACKED_PAGE, Step
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.device import Device
from attnmux.dispatch.errors import complaint
from attnmux.dispatch.spec import DTYPE_NAMES, MAX_DECODE_TOKENS, AttentionSpec

MOST_SINK_HEADS = 64
"""Query heads whose sinks the kernel is known to hold (in shared memory)."""
MOST_SPLITS = 32
KEYS_A_SPLIT = 512
"""Fewer keys are not worth the merge."""
MOST_MERGE_BLOCKS = 1 << 16
"""The merge launches blocks for the longest row allowed, in each row; most of them leave at once."""


class Schedule(NamedTuple):
    """What a step adds for this kernel.

    Args:
        metadata: int32, how rows are split, computed on the device once a plan; the kernel resets the counter in it, so only
            launches in order may share it.
        no_padding: int32 zeros ``[seqs]`` for ``leftpad_k``: given, it keeps pages of any size off the TMA path.
        splits: parts of a row's keys at most, 0: the library's choice. How many a row gets is decided on the device.
    """

    metadata: Tensor
    no_padding: Tensor
    splits: int


class FlashAttn3Backend(FlashAttnBackend):
    """Raises ``ValueError`` where the installed build leaves out what the spec needs."""

    def __init__(self, spec: AttentionSpec, device: Device, options: Mapping[str, Any]) -> None:
        super().__init__(spec, device, options)
        importlib.import_module("flash_attn_interface")  # registers the operators
        self._forward, self._metadata = torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.get_scheduler_metadata
        missing = missing_arguments(self._forward) or lacks(spec, build_flags())
        if missing:
            raise ValueError(complaint("the installed FlashAttention-3", missing, "a build with it", "pip install tokenspeed-fa3"))
        # Builds without the argument, and sinks that the kernel would round to bf16, take the exact way by log-sum-exps; so do
        # log-sum-exps themselves, since for a row without keys the kernel returns -inf in place of the sink.
        names = {argument.name for argument in self._forward.default._schema.arguments}
        self._kernel_sinks = "sinks" in names and not spec.return_lse and spec.num_q_heads <= MOST_SINK_HEADS
        self._page = spec.page_size or PACKED_PAGE

    def _extend(self, step: Step, batch: Batch) -> None:
        kept: Schedule | None = step.extra
        seqs = step.lens.shape[0]
        no_padding = kept.no_padding if kept else torch.zeros(seqs, dtype=torch.int32, device=step.lens.device)
        splits = kept.splits if kept else self._splits(step, batch)
        spec, (left, right) = self.spec, self._window
        metadata = (
            self._metadata(
                batch_size=seqs,
                max_seqlen_q=step.max_query_len,
                max_seqlen_k=step.table.shape[1] * self._page,  # as the operator derives it from the table
                num_heads=spec.num_q_heads,
                num_heads_k=spec.num_kv_heads,
                headdim=spec.head_size,
                headdim_v=spec.v_head_size,
                qkv_dtype=spec.dtype,
                seqused_k=step.lens,
                cu_seqlens_q=step.starts,
                leftpad_k=no_padding,
                page_size=self._page,
                is_causal=spec.causal is True,
                window_size_left=left,
                window_size_right=right,
                num_splits=splits,
            )
            if seqs
            else step.lens.new_empty(0)
        )
        if kept is not None:
            kept.metadata.copy_(metadata)
        else:
            step.extra = Schedule(metadata, no_padding, splits)

    def _splits(self, step: Step, batch: Batch) -> int:
        """The library chooses by the longest query, which within limits says nothing of this batch's prefill rows: those are counted here."""
        if self.limits is None or step.max_query_len <= MAX_DECODE_TOKENS:
            return 0
        heads = self.spec.num_q_heads
        if -(-step.max_query_len * heads // 8) * max(1, batch.num_seqs) > MOST_MERGE_BLOCKS:
            return 1
        tiles = self.spec.num_kv_heads * sum(-(-n * self.spec.group // 128) for n in batch.query_lens)
        programs = torch.cuda.get_device_properties(self._torch_device).multi_processor_count if self._torch_device.type == "cuda" else 1
        return max(1, min(programs // max(1, tiles), batch.longest_keys // KEYS_A_SPLIT, MOST_SPLITS))

    def _takes_sinks(self, sinks: Tensor) -> bool:
        return self._kernel_sinks and sinks.dtype == torch.bfloat16

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, step: Step, out: Tensor, sinks: Tensor | None, wants_lse: bool, own: bool
    ) -> Tensor | None:
        schedule: Schedule = step.extra
        more = {} if sinks is None else {"sinks": sinks.contiguous()}
        _, lse, *_ = self._forward(
            q,
            k,
            v,
            out=out,
            cu_seqlens_q=step.starts,
            seqused_k=step.lens,
            max_seqlen_q=step.max_query_len,
            page_table=table,
            leftpad_k=schedule.no_padding,
            softmax_scale=self.spec.scale,
            is_causal=self.spec.causal is True,
            window_size_left=self._window[0],
            window_size_right=self._window[1],
            scheduler_metadata=schedule.metadata if own else None,  # elsewhere, and in graphs, each launch makes its own
            num_splits=schedule.splits,
            **more,
        )
        found: Tensor = lse
        return found if wants_lse else None


USED = (
    "out", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "page_table", "leftpad_k", "softmax_scale", "is_causal", "window_size_left",
    "window_size_right", "scheduler_metadata", "num_splits",
)  # fmt: skip


def missing_arguments(operator: Any) -> str:
    """Which arguments an operator lacks, as a phrase, or nothing."""
    names = {argument.name for argument in operator.default._schema.arguments}
    lacking = [name for name in USED if name not in names]
    return f"an operator without {', '.join(lacking)}" if lacking else ""


def build_flags() -> Mapping[str, bool]:
    """What the installed build leaves out, by upstream's names; empty where it does not say."""
    try:
        config = importlib.import_module("flash_attn_config").CONFIG
    except ImportError:
        return {}
    flags: Mapping[str, bool] = config.get("build_flags", {})
    return flags


def lacks(spec: AttentionSpec, flags: Mapping[str, bool]) -> str:
    """What a build with these flags leaves out of a spec's needs, as a phrase, or nothing."""

    def off(name: str) -> bool:
        return bool(flags.get(f"FLASHATTENTION_DISABLE_{name}", False))

    if off("PAGEDKV") or off("VARLEN"):
        return "without paged rows of varying lengths"
    if spec.sliding_window is not None and off("LOCAL"):
        return "without sliding windows"
    if spec.dtype == torch.float16 and off("FP16"):
        return f"without {DTYPE_NAMES[spec.dtype]}"
    if all(off(f"HDIM{size}") for size in (64, 96, 128, 192, 256) if size >= spec.head_size):
        return f"without head size {spec.head_size}"
    return ""
