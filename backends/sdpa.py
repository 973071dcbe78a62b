"""torch's fused CPU attention kernel over chunks of pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnmux.backends._claims import LAYOUTS, every_mask
from attnmux.backends._sight import sight_of
from attnmux.dispatch.backend import Backend, LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.claims import BackendInfo, TestedOn
from attnmux.dispatch.constraints import ANY, OFF, OneOf, Range
from attnmux.dispatch.device import Device, DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.spec import COMPUTE_DTYPES, AttentionSpec, Limits
from attnmux.kernels.sdpa.run import run_step
from attnmux.kernels.sdpa.step import Step, prepare
from attnmux.kernels.sdpa.tiles import Row, Shape, scratch_bytes

attnmux_contract = "1.0"

CLAIM = replace(
    every_mask(DeviceSet("cpu"), head_size=Range(1), dtype=OneOf(*COMPUTE_DTYPES), page_size=Range(1, optional=True)),
    v_head_size=ANY,
    kv_layout=LAYOUTS,
    softcap=OFF,  # the fused kernel has none
)


@hookimpl
def attnmux_backends() -> Iterable[BackendInfo]:
    yield BackendInfo(
        name="sdpa",
        summary="torch's fused CPU kernel over chunks of pages, merged by log-sum-exp",
        claims=(CLAIM,),
        implementation=SdpaBackend,
        tested_on=(TestedOn("cpu", "CPU", "2026-11-30", "torch 2.13"),),
    )


class SdpaBackend(Backend):
    """Rows cut into tiles that the fused kernel runs; see :mod:`attnmux.kernels.sdpa`."""

    option_names = ()

    def __init__(self, spec: AttentionSpec, device: Device, options: Mapping[str, Any]) -> None:
        super().__init__(spec, device, options)
        self._threads = torch.get_num_threads()
        self._sight = sight_of(spec)
        self._shape = Shape(
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            v_head_size=spec.v_head_size,
            page_size=spec.page_size or 1,
            dtype=spec.dtype,
            alibi=spec.alibi is not None,
            native=spec.dtype == torch.bfloat16 and not spec.return_lse and not spec.sinks,
        )

    def workspace_bytes(self, limits: Limits) -> int:
        """Room for the gathered keys of one call, whatever the limits."""
        return scratch_bytes(self._shape, self._threads)

    def plan_workspace_bytes(self, batch: Batch) -> int:
        return scratch_bytes(self._shape, self._threads)

    def plan(self, batch: Batch, workspace: Tensor | None, previous: Any) -> Step:
        """Cuts every row; reads the block table, so that a changed table needs a new plan."""
        table = batch.block_table if self.spec.page_size is not None else batch.kv_start_loc
        assert workspace is not None and table is not None
        return prepare(
            self._rows(batch),
            table,
            shape=self._shape,
            sight=self._sight,
            alibi=self.spec.alibi,
            kv_layout=self.spec.kv_layout,
            scale=self.spec.scale,
            scratch=workspace,
            threads=self._threads,
            packed=self.spec.page_size is None,
        )

    def _rows(self, batch: Batch) -> list[Row]:
        lengths = batch.key_lens if batch.lengths == "exact" else batch.seq_lens.tolist()
        causal = batch.causal.tolist() if batch.causal is not None else [self.spec.causal is True] * batch.num_seqs
        prefix = batch.prefix_lens.tolist() if batch.prefix_lens is not None else [0] * batch.num_seqs
        rows, token = [], 0
        for i, q_len in enumerate(batch.query_lens):
            rows.append(Row(token, q_len, lengths[i], causal[i], batch.spans(i), prefix[i]))
            token += q_len
        return rows

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, state: Any, out: Tensor, lse: Tensor | None, layer: LayerArgs) -> None:
        run_step(state, q, k_cache, v_cache, out, lse, layer.sinks, layer.alibi_slopes)
