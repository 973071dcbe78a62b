"""The adapter of FlexAttention: rows of a batch to tiles, a layer to calls; see :mod:`attnmux.kernels.flex`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attnmux.backends._sight import sight_of
from attnmux.dispatch.backend import Backend, LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.device import Device
from attnmux.dispatch.spec import AttentionSpec, Limits
from attnmux.kernels.flex.look import Look
from attnmux.kernels.flex.run import run_step
from attnmux.kernels.flex.step import PACKED_BLOCK, Step
from attnmux.kernels.flex.tiles import SHORT_TILE, Row


class FlexBackend(Backend):
    """Compiled over the pool in place on a GPU. On a CPU torch's plain formulas, over a copy of the step's keys:
    compiled there FlexAttention returns no log-sum-exp, and plain it multiplies every key it is given.
    """

    option_names = ()

    def __init__(self, spec: AttentionSpec, device: Device, options: Mapping[str, Any]) -> None:
        super().__init__(spec, device, options)
        self._gpu = device.type != "cpu"
        self._compiler: Any = "inductor" if self._gpu else None
        self._look = Look(
            sight=sight_of(spec),
            causal=None if spec.causal == "per_sequence" else spec.causal,
            page_size=spec.page_size or PACKED_BLOCK,
            scale=spec.scale,
            softcap=spec.softcap,
            alibi=spec.alibi,
        )

    def warmup(self, limits: Limits) -> None:
        """A graph a tile size for copied keys and pools of their own, and one for pools that alternate by page; in inference mode others.

        Pools of other strides compile at their first layer.
        """
        page = self._look.page_size
        lengths = [(1, page + 5), (SHORT_TILE + 1, page + 5)]
        if self.spec.attn_type == "encoder_only":
            lengths = [(SHORT_TILE, SHORT_TILE), (page + 5, page + 5)]
        for (q_len, kv_len), pools, mode in product(lengths if self._gpu else (), (1, 2), (torch.no_grad, torch.inference_mode)):
            with mode():
                self._run_zeros(q_len, kv_len, pools)

    def _run_zeros(self, q_len: int, kv_len: int, between: int) -> None:
        """Two rows over zeros; from page to page lies the room of ``between`` pages."""
        spec, page = self.spec, self._look.page_size
        rows = [Row(i, i * q_len, q_len, kv_len, True) for i in range(2)]
        like: dict[str, Any] = {"dtype": spec.dtype, "device": self.device.torch_device}
        q = torch.zeros(2 * q_len, spec.num_q_heads, spec.head_size, **like)
        if packed := spec.page_size is None:
            pools = torch.zeros(between, 2 * kv_len, spec.num_kv_heads, spec.head_size, **like)
            where = torch.tensor([0, kv_len, 2 * kv_len], dtype=torch.int32, device=q.device)
        else:
            pools = torch.zeros(4, between, page, spec.num_kv_heads, spec.head_size, **like).transpose(0, 1)
            where = torch.arange(4, dtype=torch.int32, device=q.device).view(2, 2)
        step = Step(self._look, rows, 2 * q_len, spec.num_q_heads, where, packed, materialised=False)
        slopes = torch.ones(spec.num_q_heads, device=q.device) if spec.alibi else None
        self.run(q, pools[0], pools[-1], step, torch.empty_like(q), None, LayerArgs(alibi_slopes=slopes))

    def plan(self, batch: Batch, workspace: Tensor | None, previous: Any) -> Step:
        """Cuts every row on the host; reads the block table, so that a changed table needs a new plan."""
        packed = self.spec.page_size is None
        where = batch.kv_start_loc if packed else batch.block_table
        assert where is not None
        step = Step(self._look, self._rows(batch), batch.num_tokens, self.spec.num_q_heads, where, packed, materialised=not self._gpu)
        step.parts(self._gpu and not packed)  # what the first layer would otherwise wait for
        return step

    def _rows(self, batch: Batch) -> list[Row]:
        causal = batch.causal.tolist() if batch.causal is not None else [self.spec.causal is True] * batch.num_seqs
        prefix = batch.prefix_lens.tolist() if batch.prefix_lens is not None else [0] * batch.num_seqs
        rows, token = [], 0
        for i, (q_len, kv_len) in enumerate(zip(batch.query_lens, batch.key_lens, strict=True)):
            if q_len and kv_len:
                rows.append(Row(i, token, q_len, kv_len, causal[i], batch.spans(i), prefix[i]))
            token += q_len
        return rows

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, state: Any, out: Tensor, lse: Tensor | None, layer: LayerArgs) -> None:
        args = (layer.sinks, layer.alibi_slopes)
        run_step(state, q, k_cache, v_cache, out, lse, *args, in_place=self._gpu, compiler=self._compiler)
