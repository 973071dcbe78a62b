"""FlashInfer: fa2 on NVIDIA GPUs from Ampere on, fa3 on Hopper, NVIDIA's own kernels (trtllm-gen, cuDNN) on Blackwell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from attnmux.backends._claims import ATTN_TYPES, HALF, LAYOUTS, LENGTHS, TEXT_ROWS
from attnmux.dispatch.claims import BackendInfo, Claim
from attnmux.dispatch.constraints import ANY, OFF, ON, YES_OR_NO, AnyOf, OneOf, Range, SameAs
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.requirements import Package, Program

attnmux_contract = "1.0"

FLASHINFER = Package("flashinfer-python", ">=0.7.2", "attnmux[flashinfer]")
COMPILER = (
    Program("nvcc", "install the CUDA toolkit and put its bin folder on the path"),
    Program("ninja", "pip install ninja"),
)
"""fa2 and fa3 are C++ templates, compiled at first use."""

# Head sizes are those that are known to run: with 96 the paged fa2 kernel corrupts the device.
FA2 = Claim(
    device=DeviceSet("cuda:sm80..sm121"),
    row_class=TEXT_ROWS,
    head_size=OneOf(64, 128, 256),
    dtype=HALF,
    kv_dtype=AnyOf(SameAs("dtype"), OneOf(torch.float8_e4m3fn, torch.float8_e5m2)),
    kv_scale=OneOf(None, "tensor"),
    page_size=Range(1, optional=True),  # packed keys are pages of one
    kv_layout=LAYOUTS,
    sliding_window=ANY,
    softcap=ANY,
    return_lse=YES_OR_NO,
    requires=COMPILER,
)
FA2_16BIT = replace(FA2, kv_dtype=SameAs("dtype"), kv_scale=OFF)
CLAIMS = (  # the special ones first: of two claims that refuse as much, the first gives the reasons
    # Spans by the bidirectional-range wrapper: (causal and window) or (in the token's range and its window), which is both
    # kinds of mm_prefix. It has one range a token, so rows whose spans share a group take fa2's custom mask instead.
    replace(FA2_16BIT, row_class=OneOf("image"), mm_prefix=ON, softcap=OFF, return_lse=OFF),
    # the stock wrappers drop sinks in silence and make up their own ALiBi slopes: both go through variants, which have no softcap
    replace(FA2_16BIT, sinks=ON, softcap=OFF),
    replace(FA2_16BIT, alibi=OneOf("linear"), softcap=OFF),
    FA2,
    # fa2's window has a left side only
    replace(FA2, attn_type=ATTN_TYPES, causal=OneOf(False), sliding_window=OFF),
    # the smallest tile at head size 512 needs more than 99 KiB of shared memory
    replace(FA2_16BIT, device=DeviceSet("cuda:sm80", "cuda:sm90", "cuda:sm100", "cuda:sm103"), head_size=OneOf(512)),
    # fa3 adds this pair; which of the two runs the sizes that both have is the adapter's choice
    replace(FA2_16BIT, device=DeviceSet("cuda:sm90"), head_size=OneOf(192), v_head_size=OneOf(128)),
    # trtllm-gen: prebuilt, fetched over the network (flashinfer download-kernels); reads tables and lengths on the device
    Claim(
        device=DeviceSet("cuda:sm100", "cuda:sm103"),
        row_class=TEXT_ROWS,
        lengths=LENGTHS,
        head_size=OneOf(64, 128),
        dtype=HALF,
        page_size=OneOf(16, 32, 64),
        kv_layout=OneOf("HND"),
        sliding_window=ANY,
        sinks=YES_OR_NO,
    ),
    # cuDNN: plain causal attention without a compiler
    Claim(
        device=DeviceSet("cuda:sm100", "cuda:sm103"),
        row_class=TEXT_ROWS,
        head_size=OneOf(128),
        dtype=HALF,
        page_size=OneOf(8, 16, 32, 64, 128),
        kv_layout=LAYOUTS,
        requires=(Package("nvidia-cudnn-frontend", ">=1.32"),),
    ),
)


@hookimpl
def attnmux_backends() -> Iterable[BackendInfo]:
    yield BackendInfo(
        name="flashinfer",
        summary="FlashInfer's fa2, fa3, trtllm-gen and cuDNN kernels",
        claims=CLAIMS,
        implementation=None,
        requires=(FLASHINFER,),
        graphs=("prefill", "decode"),
    )
