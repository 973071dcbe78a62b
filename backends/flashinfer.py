"""FlashInfer: fa2 on NVIDIA GPUs from Ampere on, fa3 on Hopper, NVIDIA's own kernels (trtllm-gen, cuDNN) on Blackwell."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attnmux.backends._claims import ATTN_TYPES, HALF, LAYOUTS, LENGTHS, TEXT_ROWS
from attnmux.dispatch.claims import BackendInfo, Claim, TestedOn
from attnmux.dispatch.constraints import ANY, OFF, ON, YES_OR_NO, AnyOf, OneOf, Range, SameAs
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.reasons import Reason
from attnmux.dispatch.requirements import Package, Program

attnmux_contract = "1.0"

FLASHINFER = Package("flashinfer-python", ">=0.7.2", "attnmux[flashinfer]")


@dataclass(frozen=True, slots=True)
class BuildTool(Program):
    """A program that compiles FlashInfer's modules, or modules that are compiled already and do without it.

    Which modules a spec needs is known only later: one that is neither built nor can be is an error of warmup or of the first plan.
    """

    built: str = ""
    """Where built modules do: ``"cache"`` (compiled here before) or ``"package"`` (flashinfer-jit-cache; the cache is checked by ninja)."""

    def probe(self) -> str | None:
        return _compiler(self.name) or _prebuilt(self.built)

    def judge(self, found: str | None) -> Reason | None:
        if found:
            return None
        offered = "not on the path, and no FlashInfer module is built" if self.built == "cache" else "not on the path"
        return Reason("tool", self.name, offered, f"the program {self.name}", self.todo)


def _compiler(name: str) -> str | None:
    """The program, looked for where FlashInfer looks."""
    if name == "nvcc":
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        for path in (os.environ.get("FLASHINFER_NVCC"), f"{home}/bin/nvcc"):
            if path and Path(path).is_file():
                return path
    return Program(name).probe()


def _prebuilt(what: str) -> str | None:
    """A place that holds built modules. FlashInfer itself is not imported for it."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return "flashinfer_jit_cache"
    if what != "cache":
        return None
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer" / version
    return next((str(path.parent.parent) for path in base.glob("*/cached_ops/*batch_prefill*/*.so")), None)


COMPILER = (
    BuildTool("nvcc", "install the CUDA toolkit and put its bin folder on the path", "cache"),
    BuildTool("ninja", "pip install ninja", "package"),
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
    # kinds of mm_prefix. It has one range a token, so rows whose spans share a group take a variant of ours that looks families up.
    replace(FA2_16BIT, row_class=OneOf("image"), mm_prefix=ON, softcap=OFF),
    # the stock wrappers drop sinks in silence and make up their own ALiBi slopes: both go through a variant of ours
    replace(FA2, sinks=ON, softcap=OFF),
    replace(FA2, alibi=OneOf("linear"), softcap=OFF),
    FA2,
    # fa2's window has a left side only
    replace(FA2, attn_type=ATTN_TYPES, causal=OneOf(False), sliding_window=OFF),
    # The smallest tile at head size 512 needs more than 99 KiB of shared memory. There the kernel calls no hook of a variant behind the
    # scores, so sinks and scales would be dropped.
    replace(FA2_16BIT, device=DeviceSet("cuda:sm80", "cuda:sm90", "cuda:sm100", "cuda:sm103"), head_size=OneOf(512)),
    # fa2 again: fa3 reads keys and values by one offset, and pools of unlike widths have two
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
        implementation="attnmux.backends.flashinfer_backend:FlashInferBackend",
        requires=(FLASHINFER,),
        # A launch that a graph holds cuts every row and merges it, whatever its length, over scratch for all its tokens: cheap for decode rows
        # only. The others are launched as the step wants it.
        graphs=("decode",),
        tested_on=(TestedOn("cuda:sm90", "H200", "2026-11-30", "FlashInfer 0.7.2.post1, torch 2.11"),),
    )
