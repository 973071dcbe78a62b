"""``reference_attention``: the checks of the front door, then the oracle, dense and in any dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnmux.dispatch import host
from attnmux.dispatch.backend import LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.batch_checks import check_batch, page_bounds
from attnmux.dispatch.call_checks import check_run
from attnmux.dispatch.spec import AttentionSpec


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    batch: Batch,
    *,
    compute_dtype: torch.dtype = torch.float32,
    **per_layer: Any,
) -> tuple[Tensor, Tensor]:
    """The oracle: dense attention in plain torch, on any device.

    Args:
        q, k, v: query, key pool and value pool as for :meth:`Attention.run`.
        spec, batch: the question.
        compute_dtype: ``torch.float64`` for a reference to measure errors against; the output has it then.
        per_layer: ``sinks``, ``alibi_slopes``, ``q_scale``, ``k_scale``, ``v_scale``.

    Returns:
        ``(out [tokens, Hq, Dv], lse [tokens, Hq])``; padding tokens are 0 and ``-inf``.

    Raises:
        TypeError, ValueError: as for :meth:`Attention.plan` and :meth:`Attention.run`.
    """
    layer = LayerArgs(**per_layer)
    check_batch(spec, batch, q.device, None, True)
    wide = compute_dtype == torch.float64
    out = torch.zeros((q.shape[0], spec.num_q_heads, spec.v_head_size), dtype=spec.dtype, device=q.device)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    check_run(spec, batch.num_tokens, page_bounds(spec, batch), q, k, v, out, lse, layer, q.device, True)
    if wide:
        out, lse = out.double(), lse.double()
    device = host.answer(spec, q.device).device
    backend = host.registry().load_backend("reference")(spec, device, {"compute_dtype": compute_dtype})
    backend.run(q, k, v, backend.plan(batch, None, None), out, lse, layer)
    return out, lse
