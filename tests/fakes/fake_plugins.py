"""Plugins, platforms and a backend that tests put together by hand: small, complete, and independent of the built-in ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnmux.dispatch.backend import Backend, LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.claims import BackendInfo, Claim, Composition
from attnmux.dispatch.constraints import ANY, Constraint, OneOf
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.platform import Arch, Insertion, Order, Platform, Probed
from attnmux.dispatch.registry import Registry
from attnmux.dispatch.requirements import Toolchain
from attnmux.dispatch.selection import Selection
from attnmux.dispatch.selector import decide
from attnmux.dispatch.spec import AttentionSpec, Limits
from attnmux.dispatch.steering import Steering, combine

EVERYWHERE = DeviceSet("cuda", "rocm", "xpu", "cpu")


def claim(device: str | DeviceSet = EVERYWHERE, **fields: Any) -> Claim:
    """A claim of plain paged decoding on any device, and what ``fields`` add."""
    basics: dict[str, Constraint] = {"head_size": ANY, "dtype": ANY, "page_size": ANY, "kv_layout": OneOf("NHD", "HND")}
    return Claim(device=DeviceSet(device) if isinstance(device, str) else device, **{**basics, **fields})


def info(name: str, *claims: Claim, implementation: Any = "fake_plugins:TinyBackend", **fields: Any) -> BackendInfo:
    return BackendInfo(name=name, summary=f"the fake {name}", claims=claims or (claim(),), implementation=implementation, **fields)


def platform(*orders: Order | str, name: str = "lab_cpu", device: str = "cpu", arch: str = "x86_64", **fields: Any) -> Platform:
    """A platform with one arch whose orders are given as such, or as ``a>b``."""
    made = tuple(o if isinstance(o, Order) else Order(tuple(o.split(">")), "the lab's order") for o in orders)
    return Platform(name=name, devices=DeviceSet(device.partition(":")[0]), archs={arch: Arch(f"the {arch} of the lab")}, orders=made, **fields)


def lab(*orders: Order | str, **fields: Any) -> Platform:
    """A CPU platform that finds one device, so that selections on it are real."""
    return platform(*orders, probe="fake_plugins:probe_cpu", **fields)


def probe_cpu() -> list[Probed]:
    return [Probed("cpu", "x86_64", "the lab's CPU")]


def probe_fails() -> list[Probed]:
    raise OSError("the driver is on fire")


def plugin(
    *,
    backends: Iterable[BackendInfo] | Callable[[], Any] = (),
    platforms: Iterable[Platform] = (),
    compositions: Iterable[Composition] = (),
    orders: Iterable[Insertion] = (),
    contract: str = "1.0",
) -> SimpleNamespace:
    """A plugin object with these declarations; ``backends`` may be the hook itself."""
    made = SimpleNamespace(attnmux_contract=contract)
    declared: Mapping[str, Any] = {
        "attnmux_backends": backends,
        "attnmux_platforms": platforms,
        "attnmux_compositions": compositions,
        "attnmux_orders": orders,
    }
    for hook, value in declared.items():
        setattr(made, hook, hookimpl(value if callable(value) else lambda value=tuple(value): value))
    return made


def registry(*plugins: SimpleNamespace, **declarations: Any) -> Registry:
    """A registry that holds nothing else; ``declarations`` make one more plugin."""
    made = Registry(builtins=(), entry_points=False)
    for number, each in enumerate((*plugins, *([plugin(**declarations)] if declarations else []))):
        made.register(each, f"fake{number}")
    return made


def ask(
    made: Registry,
    spec: AttentionSpec,
    device: Any,
    *sources: Steering,
    toolchain: Toolchain | None = None,
    lengths: Any = "exact",
) -> Selection:
    """The pure selector, sources highest first."""
    return decide(spec, device, lengths, made.catalog, toolchain or Toolchain(), combine(sources, made.catalog))


class TinyBackend(Backend):
    """Causal paged attention of each row in float32, straight from the definition; writes down what it is asked."""

    calls: ClassVar[list[tuple[str, Any]]] = []

    def workspace_bytes(self, limits: Limits) -> int:
        return 8 * limits.max_num_seqs

    def plan_workspace_bytes(self, batch: Batch) -> int:
        return 8 * batch.num_seqs

    def plan(self, batch: Batch, workspace: Tensor | None, previous: Any) -> Any:
        state = {} if previous is None else previous
        state.update(batch=batch, by=type(self).__name__, workspace=workspace)
        self.calls.append(("plan", (type(self).__name__, batch.query_lens)))
        return state

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, state: Any, out: Tensor, lse: Tensor | None, layer: LayerArgs) -> None:
        assert state["by"] == type(self).__name__, "a state that another backend prepared"
        self.calls.append(("run", (type(self).__name__, k_cache.data_ptr())))
        batch, first = state["batch"], 0
        for row, q_len in enumerate(batch.query_lens):
            if q_len:
                length = int(batch.seq_lens[row])
                values, sums = self._row(q[first : first + q_len], *(self._keys(c, batch, row, length) for c in (k_cache, v_cache)))
                out[first : first + q_len] = values.to(out.dtype)
                if lse is not None:
                    lse[first : first + q_len] = sums
            first += q_len

    def _row(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not k.shape[0]:
            return q.new_zeros((*q.shape[:2], self.spec.v_head_size)), torch.full(q.shape[:2], -torch.inf)
        k, v = (t.float().repeat_interleave(self.spec.group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float() * self.spec.scale, k)
        visible = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
        scores = scores.masked_fill(~visible, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T

    def _keys(self, cache: Tensor, batch: Batch, row: int, length: int) -> Tensor:
        if self.spec.kv_layout == "HND":
            cache = cache.transpose(1, 2)
        positions = torch.arange(length)
        return cache[batch.block_table[row, positions // self.spec.page_size].long(), positions % self.spec.page_size]


class OtherBackend(TinyBackend):
    """The same under another name, so that tests can see which one ran."""


class Unfinished(Backend):
    """Lacks ``run``."""

    def plan(self, batch: Batch, workspace: Tensor | None, previous: Any) -> Any:
        return None


class NoBackend:
    """No subclass of Backend."""
