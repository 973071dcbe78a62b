"""The front door: :class:`Attention`, one for each group of layers with the same needs."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from attnmux.dispatch import config as _config
from attnmux.dispatch import host
from attnmux.dispatch.backend import Backend, LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.call_checks import call_signature, check_write, recurs
from attnmux.dispatch.device import Device
from attnmux.dispatch.errors import ConfigError, NoBackendError, complaint, suggest
from attnmux.dispatch.operator import called_plainly, expect_tensors, new_handle, split, undisturbed
from attnmux.dispatch.plan import Plan
from attnmux.dispatch.platform import Order
from attnmux.dispatch.query import Lengths
from attnmux.dispatch.selection import Selection
from attnmux.dispatch.spec import AttentionSpec, Limits, RowClass
from attnmux.dispatch.steering import Names

__all__ = ["Attention", "Plan"]

WRITTEN_FORMS = 1024
"""Forms of writes that are remembered; each count of tokens is another."""


class Attention:
    """Attention for every layer that shares a spec, on one device.

    Args:
        spec: what the layers need.
        device: as for :func:`attnmux.select`, but it must be in this machine.
        limits: the largest batch; workspace is allocated from it once. ``None``: it grows as plans need it.
        prefer, require, deny, order: as for :func:`attnmux.select`.

    Attributes:
        selection: the answer for exact host lengths.
        spec, limits: as given.
        torch_device: where tensors must be.

    Raises:
        NoBackendError: some row class has no backend.
        PluginError: the selected backend's code fails to import.
        ConfigError: its config section holds what it does not know.
        ValueError: the device is not in this machine.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device: str | torch.device | Device | None = None,
        *,
        limits: Limits | None = None,
        prefer: Names | None = None,
        require: Names | None = None,
        deny: Names | None = None,
        order: Sequence[str | Order] | str | None = None,
    ) -> None:
        if limits is not None and not isinstance(limits, Limits):
            raise TypeError(complaint("limits", type(limits).__name__, "attnmux.Limits or None"))
        self.spec = spec
        self.limits = limits
        self.lock = threading.Lock()  # plans share scratch: threads that run layers of one Attention take turns
        self.selection = host.select(spec, device, prefer=prefer, require=require, deny=deny, order=order)
        self._bounded = host.answer(spec, device, prefer=prefer, require=require, deny=deny, order=order, lengths="upper_bound")
        found = self.selection.device
        if not found.real:
            raise ValueError(complaint("device", found.name, "a device of this machine", "select() answers dry runs; only a real device can run"))
        self.torch_device = torch.device(found.torch_device)
        self.synchronise = found.type == "cpu" or _config.debug()
        self._options = {name: host.options(name) for name in self.backends}  # a context may have ended when a backend is loaded
        self._backends = {name: self._load(name) for name in self.selection.backends}
        self._writer = next(iter(self._backends.values()))
        self._written: set[Hashable] = set()  # forms of writes that were checked
        self._workspace: Tensor | None = None
        self._late: dict[Backend, Tensor] = {}  # workspaces of backends that came later and need more
        self.handle = new_handle(self)
        if limits is not None and (size := self.workspace_bytes(limits)):
            self._workspace = torch.empty(size, dtype=torch.uint8, device=self.torch_device)

    @property
    def backends(self) -> tuple[str, ...]:
        """Every backend that a plan may use: those for exact lengths, then those that only upper bounds lead to."""
        return tuple(dict.fromkeys((*self.selection.backends, *(self._bounded.backends if self._bounded.complete else ()))))

    def plan(self, batch: Batch, into: Plan | None = None) -> Plan:
        """Prepare a step; all layers of the group share the plan.

        Args:
            batch: the step's rows.
            into: an earlier plan of this object to refresh in place, for instance one that a CUDA graph captured.

        Raises:
            TypeError, ValueError: the batch is wrong, does not fit the limits, or ``into`` had rows of other classes.
            NoBackendError: upper-bound lengths were given and no backend takes them.
        """
        if into is None:
            return Plan(self, batch)
        if not isinstance(into, Plan) or into.attention is not self:
            raise ValueError(complaint("into", type(into).__name__, "a plan made by this Attention"))
        into.refresh(batch)
        return into

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: Plan,
        out: Tensor | None = None,
        only: RowClass | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        q_scale: Tensor | float | None = None,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            q: ``[tokens, Hq, D]`` in the spec's query dtype, last dimension contiguous.
            k_cache, v_cache: ``[pages, page, Hkv, D]`` (NHD), ``[pages, Hkv, page, D]`` (HND) or packed ``[kv_tokens, Hkv, D]``;
                strided views are fine. The step's own keys must have been written.
            plan: from :meth:`plan` of this object.
            out: ``[tokens, Hq, Dv]`` to write into; allocated when ``None``. Padding tokens are not written.
            only: run the rows of one class and leave the rest of ``out`` alone.
            sinks: float ``[Hq]``, with ``spec.sinks``.
            alibi_slopes: float32 ``[Hq]``, with ``spec.alibi``.
            q_scale, k_scale, v_scale: float, or float32 tensor ``[]`` or ``[Hkv]``; true value = stored value * scale.

        Returns:
            ``out``, or with ``spec.return_lse`` ``(out, lse)`` with ``lse`` float32 ``[tokens, Hq]``, natural log.

        Raises:
            TypeError, ValueError: an argument does not fit the spec or the plan; nothing has been written.
        """
        if not isinstance(plan, Plan) or plan.attention is not self:
            raise ValueError(complaint("plan", type(plan).__name__, "a plan made by this Attention"))
        per_layer = (sinks, alibi_slopes, q_scale, k_scale, v_scale)
        if undisturbed() and not self.spec.return_lse and plan.execute_known(q, k_cache, v_cache, out, None, only, *per_layer):
            return out  # type: ignore[return-value]  # of a known form, so a tensor
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
        expect_tensors(self.torch_device, given, {"out": out, "sinks": sinks, "alibi_slopes": alibi_slopes})
        if q.dim() != 3:
            raise ValueError(complaint("q", f"of rank {q.dim()}", "[tokens, Hq, D]"))
        if out is None:
            out = torch.empty((q.shape[0], self.spec.num_q_heads, self.spec.v_head_size), dtype=self.spec.dtype, device=q.device)
        lse = torch.empty((q.shape[0], self.spec.num_q_heads), dtype=torch.float32, device=q.device) if self.spec.return_lse else None
        (qt, qv), (kt, kv), (vt, vv) = split("q_scale", q_scale), split("k_scale", k_scale), split("v_scale", v_scale)
        if called_plainly(q, k_cache, v_cache, out, *per_layer):
            if not plan.execute_known(q, k_cache, v_cache, out, lse, only, *per_layer):
                plan.execute(q, k_cache, v_cache, out, lse, only, LayerArgs(*per_layer))
        else:
            torch.ops.attnmux.attention(q, k_cache, v_cache, out, lse, plan.handle, only, sinks, alibi_slopes, qt, kt, vt, qv, kv, vv)
        return out if lse is None else (out, lse)

    def write_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
    ) -> None:
        """Store new keys and values in the cache.

        Args:
            k, v: ``[tokens, Hkv, D]`` and ``[tokens, Hkv, Dv]`` in the spec's dtype.
            k_cache, v_cache: as for :meth:`run`.
            slot_mapping: int64 ``[tokens]``, ``page * page_size + offset`` (packed: the key's index); -1 is skipped.
            k_scale, v_scale: as for :meth:`run`; an fp8 cache stores value / scale, saturated.

        Raises:
            TypeError, ValueError: an argument does not fit the spec; nothing has been written.
        """
        layer = LayerArgs(k_scale=k_scale, v_scale=v_scale)
        form = call_signature(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale) if undisturbed() else None
        if form in self._written:
            self._writer.write_kv(k, v, k_cache, v_cache, slot_mapping, layer)
            return
        given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
        expect_tensors(self.torch_device, given, {})
        (kt, kv), (vt, vv) = split("k_scale", k_scale), split("v_scale", v_scale)
        if not called_plainly(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale):
            torch.ops.attnmux.write_kv(k, v, k_cache, v_cache, slot_mapping, self.handle, kt, vt, kv, vv)
            return
        self.store(k, v, k_cache, v_cache, slot_mapping, layer)
        if recurs(form) and not self.synchronise:
            if len(self._written) >= WRITTEN_FORMS:
                self._written.clear()
            self._written.add(form)

    def workspace_bytes(self, limits: Limits | None = None) -> int:
        """Bytes of workspace for any batch within the limits (by default its own). A backend that only upper-bound lengths lead to is loaded
        when it is first used or warmed up, and brings workspace of its own if it needs more.

        Raises:
            ValueError: there are no limits.
        """
        limits = limits or self.limits
        if limits is None:
            raise ValueError("workspace_bytes needs limits: pass attnmux.Limits(...), here or to Attention")
        return max((backend.workspace_bytes(limits) for backend in self._backends.values()), default=0)

    def warmup(self, lengths: Lengths | None = None) -> None:
        """Compile or build whatever the limits can reach, so that nothing is compiled while serving.

        Args:
            lengths: ``"exact"`` leaves out backends that only upper-bound lengths lead to.

        Raises:
            ValueError: there are no limits.
        """
        if self.limits is None:
            raise ValueError("warmup needs limits: pass attnmux.Limits(...) to Attention")
        for name in self.selection.backends if lengths == "exact" else self.backends:
            self.backend(name).warmup(self.limits)

    def backend(self, name: str) -> Backend:
        """The instance that serves a route."""
        if name not in self._backends:  # only routes of upper-bound lengths come late
            backend = self._backends[name] = self._load(name)
            size = backend.workspace_bytes(self.limits) if self.limits else 0
            if size > (0 if self._workspace is None else self._workspace.numel()):  # graphs may hold the one that is there
                self._late[backend] = torch.empty(size, dtype=torch.uint8, device=self.torch_device)
        return self._backends[name]

    def _load(self, name: str) -> Backend:
        kind, options = host.registry().load_backend(name), self._options[name]
        for option in options if kind.option_names is not None else ():
            if option not in (kind.option_names or ()):
                raise ConfigError(f"the options of {name} hold {option!r}: {suggest(option, kind.option_names or ())}")
        backend = kind(self.spec, self.selection.device, options)
        backend.limits = self.limits
        return backend

    def selection_for(self, lengths: Lengths) -> Selection:
        """The answer for exact or for upper-bound host lengths.

        Raises:
            NoBackendError: no backend takes upper bounds.
        """
        found = self.selection if lengths == "exact" else self._bounded
        if not found.complete:
            raise NoBackendError(host.no_backend_message(found), found)
        return found

    def workspace_for(self, backend: Backend, batch: Batch) -> Tensor | None:
        """The shared workspace, grown if there are no limits and the batch needs more."""
        if self.limits is None and (size := backend.plan_workspace_bytes(batch)) > (0 if self._workspace is None else self._workspace.numel()):
            self._workspace = torch.empty(size, dtype=torch.uint8, device=self.torch_device)
        return self._late.get(backend, self._workspace)

    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, layer: LayerArgs) -> None:
        """Check and write. Called by the operator."""
        check_write(self.spec, k, v, k_cache, v_cache, slot_mapping, layer, self.torch_device, self.synchronise)
        self._writer.write_kv(k, v, k_cache, v_cache, slot_mapping, layer)
