"""Checks of one layer's tensors against the spec and the plan. They run before anything is written."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from attnmux.dispatch.backend import LayerArgs
from attnmux.dispatch.errors import complaint
from attnmux.dispatch.expect import expect_optional, expect_tensor
from attnmux.dispatch.operator import PLAIN
from attnmux.dispatch.spec import DTYPE_NAMES, FP8_DTYPES, AttentionSpec


def check_caches(spec: AttentionSpec, k_cache: object, v_cache: object, device: torch.device) -> int:
    """Both pools against the spec; returns how many pages (packed: keys) they hold."""
    sizes = []
    for name, cache, head_size in (("k_cache", k_cache, spec.head_size), ("v_cache", v_cache, spec.v_head_size)):
        shape: tuple[int | str, ...]
        if spec.page_size is None:
            shape = ("kv_tokens", spec.num_kv_heads, head_size)
        elif spec.kv_layout == "NHD":
            shape = ("pages", spec.page_size, spec.num_kv_heads, head_size)
        else:
            shape = ("pages", spec.num_kv_heads, spec.page_size, head_size)
        tensor = expect_tensor(name, cache, shape, (spec.kv_dtype,), device)
        check_last_stride(name, tensor)
        sizes.append(tensor.shape[0])
    if sizes[0] != sizes[1]:
        raise ValueError(complaint("v_cache", f"{sizes[1]} pages", f"k_cache's {sizes[0]}"))
    return int(sizes[0])


def check_last_stride(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(complaint(f"{name}'s last dimension", f"strided by {tensor.stride(-1)}", "contiguous"))


class _Unlike:
    """Stands for an argument that is like no other."""


def call_signature(*values: object) -> Hashable:
    """All of a plain call's arguments that :func:`check_run` and :func:`check_write` look at without reading values from the device: calls alike in it
    pass or fail alike.
    """
    graded = torch.is_grad_enabled()
    return tuple(
        [  # a generator would take longer
            value
            if value is None
            else (value.shape, value.stride(), value.dtype, value.device, value.is_neg(), graded and value.requires_grad)
            if isinstance(value, Tensor) and type(value) in PLAIN
            else (type(value), value)
            if isinstance(value, int | float)
            else _Unlike()
            for value in values
        ]
    )


def recurs(signature: Hashable) -> bool:
    """Whether another call can have this signature: else it is not worth remembering."""
    return isinstance(signature, tuple) and not any(isinstance(part, _Unlike) for part in signature)


def check_run(
    spec: AttentionSpec,
    num_tokens: int,
    bounds: tuple[int, int] | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    layer: LayerArgs,
    device: torch.device,
    synchronise: bool,
) -> None:
    """One layer's tensors against the spec and the plan.

    Raises:
        TypeError, ValueError: naming the argument, its value and what was wanted.
    """
    expect_tensor("q", q, ("tokens", spec.num_q_heads, spec.head_size), (spec.q_dtype,), device)
    check_last_stride("q", q)
    if q.shape[0] < num_tokens:
        raise ValueError(complaint("q", f"{q.shape[0]} tokens long", f"at least the plan's {num_tokens}"))
    expect_tensor("out", out, (q.shape[0], spec.num_q_heads, spec.v_head_size), (spec.dtype,), device)
    check_last_stride("out", out)
    if lse is not None:
        expect_tensor("lse", lse, (q.shape[0], spec.num_q_heads), (torch.float32,), device)
    held = check_caches(spec, k_cache, v_cache, device)
    if bounds is not None and not (bounds[0] >= 0 and bounds[1] < held):
        what = "kv_start_loc reads keys" if spec.page_size is None else "block_table reads pages"
        raise ValueError(complaint(what, f"{bounds[0]} to {bounds[1]}", f"0 to {held - 1}, what k_cache holds"))
    heads = (spec.num_q_heads,)
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    expect_optional("sinks", layer.sinks, spec.sinks, "the spec has sinks=False", heads, floats, device)
    expect_optional("alibi_slopes", layer.alibi_slopes, spec.alibi is not None, "the spec has alibi=None", heads, (torch.float32,), device)
    check_scales(spec, layer, device, synchronise)
    if synchronise:
        for name in ("sinks", "alibi_slopes"):
            value = getattr(layer, name)
            if value is not None and bool(torch.isnan(value).any()):
                raise ValueError(complaint(name, "NaN for some head", "numbers"))


def check_scales(spec: AttentionSpec, layer: LayerArgs, device: torch.device, synchronise: bool) -> None:
    """Scales against the spec: present where asked for, of the right granularity, finite and above 0."""
    for name in ("k_scale", "v_scale"):
        value = getattr(layer, name)
        if spec.kv_scale is None:
            if value is not None:
                raise ValueError(f"{name} is given, but the spec has kv_scale=None: say 'tensor' or 'head' there, or leave it out")
        elif value is None:
            raise ValueError(complaint(name, "missing", f"a scale by {spec.kv_scale}, as the spec says"))
        else:
            _check_scale(name, value, () if spec.kv_scale == "tensor" else (spec.num_kv_heads,), device, synchronise)
    if layer.q_scale is not None:
        if spec.q_dtype not in FP8_DTYPES:
            raise ValueError(f"q_scale is given, but queries are {DTYPE_NAMES[spec.q_dtype]}: leave it out")
        _check_scale("q_scale", layer.q_scale, (), device, synchronise)


def _check_scale(name: str, value: Tensor | float, shape: tuple[int, ...], device: torch.device, synchronise: bool) -> None:
    if isinstance(value, Tensor):
        expect_tensor(name, value, shape, (torch.float32,), device)
        if synchronise and not bool((torch.isfinite(value) & (value > 0)).all()):
            raise ValueError(complaint(name, value.tolist(), "finite and above 0"))
    elif shape:
        raise TypeError(complaint(name, repr(value), f"a float32 tensor [{shape[0]}], one a KV head"))
    elif not (math.isfinite(value) and value > 0):
        raise ValueError(complaint(name, value, "finite and above 0"))


def check_write(
    spec: AttentionSpec,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    layer: LayerArgs,
    device: torch.device,
    synchronise: bool,
) -> None:
    """A ``write_kv`` call against the spec.

    Raises:
        TypeError, ValueError: naming the argument, its value and what was wanted.
    """
    expect_tensor("k", k, ("tokens", spec.num_kv_heads, spec.head_size), (spec.dtype,), device)
    expect_tensor("v", v, (k.shape[0], spec.num_kv_heads, spec.v_head_size), (spec.dtype,), device)
    check_last_stride("k", k)
    check_last_stride("v", v)
    held = check_caches(spec, k_cache, v_cache, device) * (spec.page_size or 1)
    expect_tensor("slot_mapping", slot_mapping, ("tokens",), (torch.int64,), device)
    if slot_mapping.shape[0] > k.shape[0]:
        raise ValueError(complaint("slot_mapping", f"{slot_mapping.shape[0]} long", f"at most k's {k.shape[0]} tokens"))
    check_scales(spec, layer, device, synchronise)
    if synchronise and slot_mapping.numel():
        lowest, highest = int(slot_mapping.min()), int(slot_mapping.max())
        if lowest < -1 or highest >= held:
            raise ValueError(complaint("slot_mapping", lowest if lowest < -1 else highest, f"-1 (skip) or 0 to {held - 1}, what k_cache holds"))
