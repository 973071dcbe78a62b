"""Backends that are wrong in one way each: the reference behind a small mistake. The kit has to find every one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmux.plugin as amx
from attnmux.dispatch import host
from attnmux.dispatch.registry import Registry

BUILTINS = ("attnmux.platforms.cpu", "attnmux.backends.reference")
CLAIM = amx.Claim(
    device=amx.DeviceSet("cpu"),
    head_size=amx.OneOf(32),
    dtype=amx.OneOf(torch.float32, torch.bfloat16),
    page_size=amx.OneOf(16, 8),
    kv_dtype=amx.AnyOf(amx.SameAs("dtype"), amx.OneOf(torch.float8_e4m3fn)),
    kv_scale=amx.OneOf(None, "head"),
    sliding_window=amx.ANY,
    sinks=amx.YES_OR_NO,
    return_lse=amx.YES_OR_NO,
)


class Honest(amx.Backend):
    """The reference under another name; subclasses spoil one thing."""

    def __init__(self, spec: amx.AttentionSpec, device: amx.Device, options: Mapping[str, Any]) -> None:
        super().__init__(spec, device, options)
        self.inner = host.registry().load_backend("reference")(self.spoil_spec(spec), device, {})

    def spoil_spec(self, spec: amx.AttentionSpec) -> amx.AttentionSpec:
        return spec

    def spoil_layer(self, layer: amx.LayerArgs) -> amx.LayerArgs:
        return layer

    def spoil_answer(self, state: amx.Batch, v_cache: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Change what the reference wrote."""

    def plan(self, batch: amx.Batch, workspace: Tensor | None, previous: Any) -> amx.Batch:
        return batch

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, state: Any, out: Tensor, lse: Tensor | None, layer: amx.LayerArgs) -> None:
        planned = self.inner.plan(state, None, None)
        self.inner.run(q, k_cache, v_cache, planned, out, lse, self.spoil_layer(layer))
        self.spoil_answer(state, v_cache, out, lse)


class IgnoresWindow(Honest):
    def spoil_spec(self, spec):
        return spec.replace(sliding_window=None)


class WindowOffByOne(Honest):
    def spoil_spec(self, spec):
        return spec if spec.sliding_window is None else spec.replace(sliding_window=spec.sliding_window + 1)


class IgnoresSinks(Honest):
    def spoil_spec(self, spec):
        return spec.replace(sinks=False)

    def spoil_layer(self, layer):
        return layer._replace(sinks=None)


class LogToBaseTwo(Honest):
    def spoil_answer(self, state, v_cache, out, lse):
        if lse is not None:
            lse *= math.log2(math.e)


class ReadsDirtyTail(Honest):
    """Weighs the keys beyond a row's end with 0 instead of leaving them out."""

    def spoil_answer(self, state, v_cache, out, lse):
        starts = state.query_start_loc.tolist()
        for row, keys in enumerate(state.key_lens):
            if keys % self.spec.page_size and state.query_lens[row]:
                page = int(state.block_table[row, keys // self.spec.page_size])
                out[starts[row] : starts[row + 1]] += 0 * v_cache[page, -1].to(out.dtype).sum()


class IgnoresPerHeadScale(Honest):
    def spoil_layer(self, layer):
        if not isinstance(layer.k_scale, Tensor):
            return layer
        return layer._replace(k_scale=torch.full_like(layer.k_scale, layer.k_scale[0]), v_scale=torch.full_like(layer.v_scale, layer.v_scale[0]))


class LinearForSqrt(Honest):
    """Computes linear ALiBi for either kind."""

    def spoil_spec(self, spec):
        return spec.replace(alibi="linear") if spec.alibi else spec


class DependsOnBatch(Honest):
    def spoil_answer(self, state, v_cache, out, lse):
        out *= 1 + 1e-6 * (state.num_seqs > 1)


class LooksAtPageIds(Honest):
    def spoil_answer(self, state, v_cache, out, lse):
        out *= 1 + 1e-6 * (int(state.block_table.max()) > 60)


class KeepsOldPlan(Honest):
    """Hands back the earlier state when a plan is made anew."""

    def plan(self, batch, workspace, previous):
        return batch if previous is None else previous


class HoldsOnePlan(Honest):
    """Keeps the last plan in itself, whichever is run."""

    def plan(self, batch, workspace, previous):
        self.last = batch
        return 0

    def run(self, q, k_cache, v_cache, state, out, lse, layer):
        super().run(q, k_cache, v_cache, self.last, out, lse, layer)


class WritesSkippedSlots(Honest):
    def write_kv(self, k, v, k_cache, v_cache, slot_mapping, layer):
        super().write_kv(k, v, k_cache, v_cache, slot_mapping.clamp(min=0), layer)


class NeverRefusesInfo(amx.BackendInfo):
    """Overrides the verdict instead of stating claims."""

    def judge(self, query, toolchain):
        return self.claims[0], ()


class Silent:
    """A constraint that tells the matrix that nothing is accepted, and accepts everything."""

    def accepts(self, value: Any, query: amx.Query) -> bool:
        return True

    def wants(self) -> str:
        return "no"

    def cell(self) -> str:
        return ""


Declare = Callable[..., str]


@pytest.fixture
def declare() -> Iterator[Declare]:
    """``declare(Backend, **claim)`` registers a backend ``acme`` with these changes to the claim, and returns its name."""
    with host.using(Registry(BUILTINS, entry_points=False)) as registry:

        def add(implementation: type[amx.Backend] = Honest, info: type[amx.BackendInfo] = amx.BackendInfo, **changes: Any) -> str:
            declared = info(name="acme", summary="a test", claims=(replace(CLAIM, **changes),), implementation=implementation)
            hook = amx.hookimpl(lambda: [declared], specname="attnmux_backends")
            registry.register(SimpleNamespace(attnmux_contract="1.0", attnmux_backends=hook), "acme")
            return "acme"

        yield add


@pytest.fixture
def wrong() -> Any:
    """The classes above, by name."""
    return SimpleNamespace(**{name: value for name, value in globals().items() if isinstance(value, type)})
