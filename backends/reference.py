"""The oracle as a backend: plain torch, every semantic, every device, dense and slow."""

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
from attnmux.dispatch.constraints import ANY, YES_OR_NO, AnyOf, OneOf, Range, SameAs
from attnmux.dispatch.device import Device, DeviceSet
from attnmux.dispatch.errors import ConfigError, complaint
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.spec import COMPUTE_DTYPES, FP8_DTYPES, AttentionSpec
from attnmux.kernels.reference import reference_attention

attnmux_contract = "1.0"

CLAIM = replace(
    every_mask(DeviceSet("cuda", "rocm", "xpu", "cpu"), head_size=Range(1), dtype=OneOf(*COMPUTE_DTYPES), page_size=Range(1, optional=True)),
    v_head_size=ANY,
    q_dtype=AnyOf(SameAs("dtype"), OneOf(*FP8_DTYPES)),
    kv_dtype=AnyOf(SameAs("dtype"), OneOf(*FP8_DTYPES)),
    kv_scale=OneOf(None, "tensor", "head"),
    kv_layout=LAYOUTS,
    batch_invariant=YES_OR_NO,
)


@hookimpl
def attnmux_backends() -> Iterable[BackendInfo]:
    yield BackendInfo(
        name="reference",
        summary="the oracle: plain torch, every semantic, every device, dense and slow",
        claims=(CLAIM,),
        implementation=ReferenceBackend,
        tested_on=(TestedOn("cpu", "CPU", "2026-11-30", "torch 2.13"),),
    )


class ReferenceBackend(Backend):
    """Row by row through :func:`attnmux.kernels.reference.reference_attention`.

    The option ``compute_dtype`` is ``float32`` (the default) or ``float64``.
    """

    option_names = ("compute_dtype",)

    def __init__(self, spec: AttentionSpec, device: Device, options: Mapping[str, Any]) -> None:
        super().__init__(spec, device, options)
        chosen = options.get("compute_dtype", torch.float32)
        names = {"float32": torch.float32, "float64": torch.float64}
        self._compute_dtype: torch.dtype = names.get(chosen, chosen)
        if self._compute_dtype not in names.values():
            raise ConfigError(complaint("compute_dtype of backend 'reference'", repr(chosen), "float32 or float64"))
        self._sight = sight_of(spec)

    def plan(self, batch: Batch, workspace: Tensor | None, previous: Any) -> Batch:
        """The batch itself: everything is read when it is run."""
        return batch

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, state: Any, out: Tensor, lse: Tensor | None, layer: LayerArgs) -> None:
        """Synchronises: lengths, masks and scales are host values here."""
        batch: Batch = state
        spec = self.spec
        per_sequence = spec.causal == "per_sequence" and batch.causal is not None
        reference_attention(
            q,
            k_cache,
            v_cache,
            query_lens=batch.query_lens,
            seq_lens=batch.key_lens if batch.lengths == "exact" else batch.seq_lens.tolist(),
            block_table=batch.block_table,
            kv_start_loc=batch.kv_start_loc,
            kv_layout=spec.kv_layout,
            scale=spec.scale,
            causal=batch.causal.tolist() if per_sequence else bool(spec.causal),  # type: ignore[union-attr]
            sight=self._sight,
            spans=[batch.spans(row) for row in range(batch.num_seqs)],
            prefix_lens=None if batch.prefix_lens is None else batch.prefix_lens.tolist(),
            softcap=spec.softcap,
            alibi=spec.alibi,
            alibi_slopes=layer.alibi_slopes,
            sinks=layer.sinks,
            q_scale=layer.q_scale,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            compute_dtype=self._compute_dtype,
            out=out,
            lse=lse,
        )
