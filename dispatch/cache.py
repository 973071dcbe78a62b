"""Writing keys and values into a paged cache with plain torch operators."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmux.dispatch.spec import FP8_DTYPES, AttentionSpec


def write_kv(
    spec: AttentionSpec,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
) -> None:
    """Store ``k [tokens, Hkv, D]`` and ``v [tokens, Hkv, Dv]`` at their slots, quantised when the cache is fp8.

    A stored value times its scale is the true value; values beyond the format saturate at its largest finite one.
    The caches are written through their strides, so views are fine.
    """
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        values = quantize(new[: slot_mapping.shape[0]][keep], spec, scale)
        if values.dtype in FP8_DTYPES:  # index_put has no fp8 kernel: bytes move the same
            values, cache = values.view(torch.uint8), cache.view(torch.uint8)
        if spec.page_size is None:
            cache[slots] = values
        else:
            pages, offsets = slots // spec.page_size, slots % spec.page_size
            nhd = cache if spec.kv_layout == "NHD" else cache.transpose(1, 2)
            nhd[pages, offsets] = values


def quantize(values: Tensor, spec: AttentionSpec, scale: Tensor | float | None) -> Tensor:
    """``[tokens, Hkv, D]`` in the cache's dtype; fp8 saturates instead of overflowing to NaN or infinity."""
    if spec.kv_dtype not in FP8_DTYPES:
        return values.to(spec.kv_dtype)
    scaled = values.float()
    if scale is not None:
        # a tensor on the device even for a number: by a host scalar torch multiplies with the reciprocal there, which tips ties
        divisor = scale if isinstance(scale, Tensor) else torch.full((), scale, device=scaled.device)
        scaled = scaled / (divisor[:, None] if divisor.dim() == 1 else divisor)
    largest = torch.finfo(spec.kv_dtype).max
    return scaled.clamp(-largest, largest).to(spec.kv_dtype)
