"""Which compiled module of FlashInfer runs which rows of a spec, and the arguments that name it. Imports nothing of FlashInfer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.backends._flashinfer_variant import NAME, Variant
from attnmux.dispatch.device import Device, sm_version
from attnmux.dispatch.dtypes import DTYPE_NAMES
from attnmux.dispatch.errors import ConfigError, complaint, suggest
from attnmux.dispatch.spec import AttentionSpec

KERNELS = ("auto", "fa2", "fa3", "trtllm-gen", "cudnn")
FA3_QUERY_LEN = 65
"""Query tokens from which on a row goes to fa3: below it one tile of fa2 holds them, and over pages fa3 took 3 to 11 times as long in decode
(H200, FlashInfer 0.7.2)."""


@dataclass(frozen=True, slots=True)
class Options:
    """The backend's config section.

    Args:
        kernel: one of :data:`KERNELS`; whatever but ``"auto"`` fixes the kernel of text rows.
        cuda_graphs: under limits, decode rows are planned so that a CUDA graph may hold them. Off, the grid follows the step, and skewed
            batches are cut evenly.
    """

    kernel: str = "auto"
    cuda_graphs: bool = True


def options_of(options: Mapping[str, Any], spec: AttentionSpec, device: Device) -> Options:
    """The options, checked.

    Raises:
        ConfigError: an option is of the wrong type, the kernel does not exist, or cannot run this spec on this device.
    """
    graphs, kernel = options.get("cuda_graphs", True), options.get("kernel", "auto")
    if not isinstance(graphs, bool):
        raise ConfigError(complaint("cuda_graphs in the options of flashinfer", repr(graphs), "true or false"))
    if kernel not in KERNELS:
        raise ConfigError(f"kernel in the options of flashinfer is {kernel!r}: {suggest(str(kernel), KERNELS)}")
    able = ("auto", *kernels_for(spec, device))
    if kernel not in able:
        raise ConfigError(
            complaint("kernel in the options of flashinfer", repr(kernel), f"one that runs this spec on {device.name}: {', '.join(able)}")
        )
    return Options(kernel, graphs)


def kernels_for(spec: AttentionSpec, device: Device) -> tuple[str, ...]:
    """Kernels that can run text rows of a spec (claimed by this backend) on a device."""
    found = ["fa2"] if (spec.head_size, spec.v_head_size) != (192, 128) or device.arch == "sm90" else []
    plain = variant_of(spec) == Variant() and spec.kv_dtype == spec.dtype and spec.attn_type == "decoder" and spec.causal is True
    # fa3 reads K and V by one offset, so pools of different widths, whose pages lie differently far apart, are not for it
    if device.arch == "sm90" and plain and spec.head_size == spec.v_head_size and spec.head_size in (64, 128, 256):
        found.append("fa3")
    blackwell = sm_version(device.arch) in (100, 103) and spec.page_size is not None and spec.kv_dtype == spec.dtype and spec.scale > 0
    causal = spec.attn_type == "decoder" and spec.causal is True and not spec.return_lse and spec.head_size == spec.v_head_size
    modified = spec.softcap is not None or spec.alibi is not None
    if blackwell and causal and not modified:
        if spec.head_size in (64, 128) and spec.page_size in (16, 32, 64) and spec.kv_layout == "HND":
            found.append("trtllm-gen")
        if spec.head_size == 128 and spec.page_size in (8, 16, 32, 64, 128) and not spec.sinks and spec.sliding_window is None:
            found.append("cudnn")
    return tuple(found)


def variant_of(spec: AttentionSpec) -> Variant:
    """The variant that text rows need; ``Variant()`` is what the stock kernels compute."""
    return Variant(
        softcap=spec.softcap is not None,
        alibi=spec.alibi is not None,
        sinks=spec.sinks,
        scales=spec.kv_scale is not None,  # whether a scale is a number or a tensor is known to each layer only
        negative=spec.scale < 0,
    )


@dataclass(frozen=True, slots=True)
class Module:
    """One module that nvcc compiles: a kernel family for fixed types and head sizes.

    Args:
        kind: ``"stock"``, ``"variant"`` (ours) or ``"ranges"`` (FlashInfer's own for spans).
        kernel: ``"fa2"`` or ``"fa3"``.
        dtype, kv_dtype: of queries and output, and of the cache.
        head_size, v_head_size: of keys and of values.
        window: stock kernels with a window are modules of their own; the others read it when they run.
        variant: the struct, where ``kind`` is ``"variant"``.
    """

    kind: str
    kernel: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_size: int
    v_head_size: int
    window: bool = False
    variant: Variant = Variant()

    @property
    def owns_mask(self) -> bool:
        return self.kind == "ranges" or self.variant.families

    @property
    def name(self) -> str:
        types = "_".join(DTYPE_NAMES[dtype] for dtype in dict.fromkeys((self.dtype, self.kv_dtype)))
        sizes = "_".join(str(size) for size in dict.fromkeys((self.head_size, self.v_head_size)))
        return (
            f"{self.kernel}_{self.kind}{'_window' if self.window else ''}{'_' + self.variant.label if self.kind == 'variant' else ''}_{types}_{sizes}"
        )

    def jit_args(self) -> list[Any]:
        """Positional arguments of ``gen_customize_batch_prefill_module`` behind the kernel's name."""
        tensors, v = self.variant.tensors, self.variant
        names, kinds = [name for name, _ in tensors], [kind for _, kind in tensors]
        types = [self.dtype, self.kv_dtype, self.dtype, torch.int32, self.head_size, self.v_head_size]
        return [f"attnmux_{self.name}", *types, names, kinds, list(v.scalars), ["double"] * len(v.scalars), NAME, v.source]

    def jit_kwargs(self) -> dict[str, Any]:
        """Its keyword arguments, none left to a default. K and V by strides of their own: any pools will do, at half the compilation."""
        return {
            "pos_encoding_mode": 0,
            "use_sliding_window": False,
            "use_logits_soft_cap": False,
            "use_fp16_qk_reduction": False,
            "fp8_enabled": False,
            "paged_kv_stride_mode": "independent",
            "module_surface": "full",
        }


def module_for(spec: AttentionSpec, kind: str) -> Module:
    """The module that runs rows of a kind: ``fa2``, ``fa3``, ``ranges`` (spans that share no sight) or ``families`` (spans that do)."""
    fixed: dict[str, Any] = {"dtype": spec.dtype, "kv_dtype": spec.kv_dtype, "head_size": spec.head_size, "v_head_size": spec.v_head_size}
    variant = variant_of(spec)
    if kind == "ranges" and not variant.negative:  # FlashInfer's wrapper refuses nothing else that is claimed with spans
        return Module("ranges", "fa2", **fixed)
    if kind in ("ranges", "families"):
        families = Variant(negative=variant.negative, families=True, within=spec.mm_prefix == "within_window")
        return Module("variant", "fa2", variant=families, **fixed)
    if variant == Variant():
        return Module("stock", kind, window=spec.sliding_window is not None, **fixed)
    return Module("variant", "fa2", variant=variant, **fixed)


def reachable(spec: AttentionSpec, device: Device, options: Options) -> tuple[Module, ...]:
    """Every module that some batch of a spec needs."""
    able = kernels_for(spec, device)
    text = [k for k in ("fa2", "fa3") if k in able and options.kernel in ("auto", k)]
    spans = ["ranges", "families"] if spec.mm_prefix is not None else []
    return tuple(dict.fromkeys(module_for(spec, kind) for kind in (*text, *spans)))
