"""attnmux's own Triton kernels: every semantic on every GPU, from one code base."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from attnmux.backends._claims import HALF, LAYOUTS, every_mask
from attnmux.dispatch.claims import BackendInfo, TestedOn
from attnmux.dispatch.constraints import YES_OR_NO, AnyOf, OneOf, Range, SameAs
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.query import Query
from attnmux.dispatch.requirements import Package, Setting
from attnmux.dispatch.spec import FP8_DTYPES
from attnmux.kernels.triton.config import Target, shared_memory, smallest_tile

attnmux_contract = "1.0"

TRITON = Package("triton", ">=3.4", also=("triton-rocm", "pytorch-triton-rocm", "triton-xpu", "pytorch-triton-xpu"))
"""torch's ROCm and XPU builds bring the same module under other names."""


class FittingSizes(Range):
    """Head sizes whose smallest tile fits the device's shared memory."""

    __slots__ = ()

    def accepts(self, value: Any, query: Query) -> bool:
        limit = query.device.shared_memory  # 0: unknown, or a CPU
        return Range.accepts(self, value, query) and (limit == 0 or _least_memory(query) <= limit)

    def wants_for(self, value: Any, query: Query) -> str:
        if not Range.accepts(self, value, query):
            return self.wants()
        needs = f"{_least_memory(query)} bytes with {query.spec.group} query heads a KV head"
        return f"a size whose smallest tile, here {needs}, fits {query.device.shared_memory} bytes of shared memory"


def _least_memory(query: Query) -> int:
    spec, device = query.spec, query.device
    target = Target(device.type, device.arch, device.shared_memory, "tma" in device.features)
    sizes = spec.head_size, spec.v_head_size, spec.dtype.itemsize, spec.kv_dtype.itemsize
    return shared_memory(target, smallest_tile(spec.group), *sizes)


SIZES = FittingSizes(16, 512, of=8)
FULL = replace(
    every_mask(
        DeviceSet("cuda:sm80+", "rocm", "xpu"), head_size=SIZES, dtype=OneOf(*HALF.values, torch.float32), page_size=Range(1, 1056, optional=True)
    ),
    v_head_size=Range(16, 512, of=8),
    # where the device lacks an fp8 format its bytes are decoded by integer operations, so each format works everywhere
    q_dtype=AnyOf(SameAs("dtype"), OneOf(*FP8_DTYPES)),
    kv_dtype=AnyOf(SameAs("dtype"), OneOf(*FP8_DTYPES)),
    kv_scale=OneOf(None, "tensor", "head"),
    kv_layout=LAYOUTS,
    batch_invariant=YES_OR_NO,
)
CLAIMS = (
    FULL,
    # Turing multiplies matrices in fp16 only; bf16 compiles to scalar arithmetic there, in ten seconds and more a kernel
    replace(FULL, device=DeviceSet("cuda:sm75..sm79"), dtype=OneOf(torch.float16)),
    # the interpreter's bf16 arithmetic is wrong in Triton 3.6 to 3.9
    replace(FULL, device=DeviceSet("cpu"), dtype=OneOf(torch.float16, torch.float32), requires=(Setting("TRITON_INTERPRET", "1"), Package("numpy"))),
)


@hookimpl
def attnmux_backends() -> Iterable[BackendInfo]:
    yield BackendInfo(
        name="triton",
        summary="attnmux's own Triton kernels: every semantic, every GPU",
        claims=CLAIMS,
        implementation="attnmux.backends.triton_backend:TritonBackend",
        requires=(TRITON,),
        graphs=("prefill", "decode"),
        tested_on=(TestedOn("cuda:sm90", "H200", "2026-12-01", "torch 2.11, Triton 3.6"),),
    )
