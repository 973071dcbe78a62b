"""This process: the registry, what the machine has, and memoised selection. The shell around the pure selector."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from attnmux.dispatch import config as _config
from attnmux.dispatch.device import Device
from attnmux.dispatch.devices import probe_machine, resolve
from attnmux.dispatch.errors import NoBackendError
from attnmux.dispatch.platform import Order
from attnmux.dispatch.query import Lengths
from attnmux.dispatch.registry import Registry
from attnmux.dispatch.requirements import Toolchain
from attnmux.dispatch.selection import Selection
from attnmux.dispatch.selector import decide
from attnmux.dispatch.spec import AttentionSpec
from attnmux.dispatch.steering import Names, Steering, combine, steer

_log = logging.getLogger("attnmux")
_MEMO_LIMIT = 4096
_memo: dict[Hashable, Selection] = {}


@dataclass(frozen=True, slots=True)
class Host:
    """What selection reads of this machine, taken together so that it is consistent."""

    version: int
    devices: tuple[Device, ...]
    toolchain: Toolchain


@lru_cache(maxsize=1)
def registry() -> Registry:
    """The registry of this process: built-ins and installed plugins."""
    return Registry(disabled=_config.base().disabled)


def reset() -> None:
    """Forget the registry, the machine and every memoised answer."""
    registry.cache_clear()
    _forget_answers()


@contextmanager
def using(replacement: Registry) -> Iterator[Registry]:
    """Inside, the whole process has another registry: for tests of plugins. What the usual one holds is kept."""
    global registry
    usual = registry
    try:
        registry = lru_cache(maxsize=1)(lambda: replacement)
        _forget_answers()
        yield replacement
    finally:
        registry = usual
        _forget_answers()


def _forget_answers() -> None:
    _host.cache_clear()
    _memo.clear()


@lru_cache(maxsize=4)
def _host(version: int) -> Host:
    catalog = registry().catalog
    requirements = [r for info in catalog.backends.values() for r in info.requirements()]
    return Host(version, probe_machine(catalog), Toolchain.of(requirements))


def host() -> Host:
    """The current snapshot; made anew when the registry changes."""
    return _host(registry().version)


def devices() -> tuple[Device, ...]:
    """What is in this machine, accelerators first, the CPU last. Creates no CUDA context."""
    return host().devices


def answer(
    spec: AttentionSpec,
    device: str | torch.device | Device | None = None,
    *,
    prefer: Names | None = None,
    require: Names | None = None,
    deny: Names | None = None,
    order: Sequence[str | Order] | str | None = None,
    lengths: Lengths = "exact",
) -> Selection:
    """Like :func:`select`, but an incomplete selection is returned, not raised."""
    context = _config.context()
    key: Hashable = (spec, device, prefer, require, deny, order, lengths, context, registry().version)
    try:
        found = _memo.get(key)
    except TypeError:  # a list or a mapping
        key = (spec, device, _frozen(prefer), _frozen(require), _frozen(deny), _frozen(order), lengths, context, registry().version)
        try:
            found = _memo.get(key)
        except TypeError:  # something that is no setting: what reads it below says so
            found = None
    if found is None:
        if not isinstance(spec, AttentionSpec):
            raise TypeError(f"spec is {type(spec).__name__}, wanted attnmux.AttentionSpec")
        if lengths not in ("exact", "upper_bound"):
            raise ValueError(f"lengths is {lengths!r}, wanted 'exact' or 'upper_bound'")
        argument = steer("argument", prefer=prefer, require=require, deny=deny, order=order)
        found = _answer(spec, device, lengths, (argument, *context, *_config.base().steerings))
        if len(_memo) >= _MEMO_LIMIT:
            _memo.clear()
        _memo[key] = found
    return found


def select(
    spec: AttentionSpec,
    device: str | torch.device | Device | None = None,
    *,
    prefer: Names | None = None,
    require: Names | None = None,
    deny: Names | None = None,
    order: Sequence[str | Order] | str | None = None,
    lengths: Lengths = "exact",
) -> Selection:
    """Which kernel runs which rows, and why every other one was passed over. Memoised; creates no CUDA context.

    Args:
        spec: what the layer needs.
        device: ``None`` for the first device here, a name such as ``"cuda:sm100"``, ``"rocm:mi300"``, ``"xpu"`` or
            ``"cpu"``, ``"cuda:0"``, or a ``torch.device``. A device that this machine lacks makes it a dry run:
            absent packages are notes instead of reasons.
        prefer: a backend, several, or ``{row class: name}``, tried first.
        require: the same; nothing else will do.
        deny: the same; never.
        order: names, best first, or :class:`attnmux.plugin.Order` entries.
        lengths: what ``Batch.seq_lens_cpu`` will promise.

    Raises:
        NoBackendError: some row class has no backend; carries the selection.
        ConfigError: a setting is wrong; unknown names are listed with what exists.
        UnknownDeviceError: the device is not recognised.
        TypeError: ``spec`` is no spec.
    """
    found = answer(spec, device, prefer=prefer, require=require, deny=deny, order=order, lengths=lengths)
    if not found.complete:
        raise NoBackendError(no_backend_message(found), found)
    return found


def no_backend_message(selection: Selection) -> str:
    """What :class:`NoBackendError` says: each empty class with every candidate's reasons."""
    from attnmux.dispatch.explain import explain_failure

    return explain_failure(selection)


def options(backend: str) -> Mapping[str, Any]:
    """A backend's own settings: the contexts', then the file's, the innermost first."""
    merged: dict[str, Any] = {}
    for steering in reversed((*_config.context(), *_config.base().steerings)):
        merged.update({key: value for name, key, value in steering.options if name == backend})
    return merged


def _answer(spec: AttentionSpec, device: str | torch.device | Device | None, lengths: Lengths, sources: tuple[Steering, ...]) -> Selection:
    catalog, here = registry().catalog, host()
    steered = combine(sources, catalog)
    selection = decide(spec, resolve(device, catalog, here.devices), lengths, catalog, here.toolchain, steered)
    for decision in selection.classes.values() if lengths == "exact" else ():  # the other is asked beside it, and says the same
        for note in decision.notes:
            _log.warning(note)
    return selection


def _frozen(value: Any) -> Hashable:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "by class", *((k, _frozen(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(value)
    return value  # type: ignore[no-any-return]  # of the wrong type: steer says so
