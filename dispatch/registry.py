"""Plugins and what they declare: discovery, isolation of broken ones, conflicts, provenance. The only user of pluggy."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pluggy

from attnmux.dispatch import hookspecs
from attnmux.dispatch.backend import Backend
from attnmux.dispatch.catalog import Catalog, merged
from attnmux.dispatch.claims import BackendInfo, Composition
from attnmux.dispatch.errors import PluginError, suggest
from attnmux.dispatch.health import HealthCheck
from attnmux.dispatch.platform import Insertion, Platform

GROUP = "attnmux"
BUILTINS: tuple[str, ...] = (
    "attnmux.platforms.cuda_sm80",
    "attnmux.platforms.cuda_sm90",
    "attnmux.platforms.cuda_sm100",
    "attnmux.platforms.cuda_generic",
    "attnmux.platforms.rocm_mi300",
    "attnmux.platforms.rocm_generic",
    "attnmux.platforms.xpu",
    "attnmux.platforms.cpu",
    "attnmux.backends.reference",
    "attnmux.backends.sdpa",
    "attnmux.backends.triton",
    "attnmux.backends.flashinfer",
    "attnmux.backends.flash_attn_3",
    "attnmux.backends.flash_attn_4",
    "attnmux.backends.flex",
    "attnmux.backends.ipex",
    "attnmux.backends.xpu_kernels",
    "attnmux.backends.aiter",
    "attnmux.backends.compositions",
    "attnmux.dispatch.doctor",
)
"""Built-in plugins, loaded by name through the same hooks as everybody else's."""


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One plugin and what became of it."""

    name: str
    origin: Literal["builtin", "entry point", "runtime"]
    state: Literal["active", "disabled", "failed"]
    distribution: str = ""
    error: str = ""


class Registry:
    """The plugins of one process, or of one test.

    Args:
        builtins: dotted names of modules to load first.
        entry_points: whether to load installed plugins of the group ``attnmux``.
        disabled: plugin or distribution names that are listed but never imported.
    """

    def __init__(self, builtins: Sequence[str] = BUILTINS, *, entry_points: bool = True, disabled: Iterable[str] = ()) -> None:
        self._manager = pluggy.PluginManager("attnmux")
        self._manager.add_hookspecs(hookspecs)
        self._disabled = frozenset(disabled)
        self.records: dict[str, PluginRecord] = {}
        self.catalog = Catalog()
        self.version = 0
        self._declared: dict[str, dict[str, list[Any]]] = {}
        for name in builtins:
            self._load(name, "builtin", "", lambda name=name: importlib.import_module(name))
        if entry_points:
            points = [(point.name, _label(point.dist), point) for point in importlib.metadata.entry_points(group=GROUP)]
            for name, distribution, point in sorted(points, key=lambda found: found[:2]):  # not in the order of sys.path
                self._load(name, "entry point", distribution, point.load)

    def register(self, plugin: object, name: str) -> None:
        """Add a plugin at run time.

        Raises:
            PluginError: it breaks the contract; nothing of it is kept.
        """
        try:
            self._admit(plugin, name)
        except Exception as error:
            raise PluginError(f"plugin {name!r} was not registered: {error}") from error
        self.records[name] = PluginRecord(name, "runtime", "active")

    def unregister(self, name: str) -> None:
        """Forget a plugin and everything it declared.

        Raises:
            PluginError: no active plugin has that name.
        """
        record = self.records.get(name)
        if record is None or record.state != "active":
            active = [r.name for r in self.records.values() if r.state == "active"]
            raise PluginError(f"no active plugin {name!r}: {suggest(name, active)}")
        self._manager.unregister(name=name)
        del self.records[name], self._declared[name]
        catalog = Catalog()
        for plugin, found in self._declared.items():
            catalog = merged(catalog, plugin, found)
        broken = {backend: error for backend, error in self.catalog.broken.items() if backend in catalog.backends}
        self.catalog, self.version = replace(catalog, broken=broken), self.version + 1

    def load_backend(self, name: str) -> type[Backend]:
        """Import a backend's implementation.

        Raises:
            PluginError: its module fails to import, or is no :class:`Backend`. Later selections pass it over with that reason.
        """
        target = self.catalog.backends[name].implementation
        try:
            loaded = _resolve(target) if isinstance(target, str) else target
            if not (isinstance(loaded, type) and issubclass(loaded, Backend)):
                raise TypeError(f"{target!r} is no subclass of attnmux.plugin.Backend")
            if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
                raise TypeError(f"{target!r} does not define {', '.join(missing)}")
        except Exception as error:
            self.catalog.broken[name] = f"{type(error).__name__}: {error}"
            self.version += 1
            raise PluginError(f"backend {name!r} (plugin {self.catalog.providers[name]}) failed to load: {type(error).__name__}: {error}") from error
        return loaded

    def _load(self, name: str, origin: Literal["builtin", "entry point"], distribution: str, load: Any) -> None:
        label = f"{name} ({distribution})" if name in self.records else name
        if name in self._disabled or distribution.split(" ")[0] in self._disabled - {""}:
            self.records[label] = PluginRecord(label, origin, "disabled", distribution)
            return
        try:
            if self._manager.has_plugin(name):
                raise PluginError(f"a plugin named {name!r} is active already: disable one of them by its distribution")
            self._admit(load(), label)
        except (Exception, SystemExit) as error:  # a broken plugin must not take the host down; doctor shows it
            self.records[label] = PluginRecord(label, origin, "failed", distribution, f"{type(error).__name__}: {error}")
        else:
            self.records[label] = PluginRecord(label, origin, "active", distribution)

    def _admit(self, plugin: object, name: str) -> None:
        _check_contract(plugin)
        if self._manager.has_plugin(name):
            raise PluginError(f"a plugin named {name!r} is active already")
        self._manager.register(plugin, name)
        try:
            self._manager.check_pending()  # otherwise a misspelt hook is never called, in silence
            found = self._declarations(name)
            self.catalog = merged(self.catalog, name, found)
        except (Exception, SystemExit):
            self._manager.unregister(name=name)
            raise
        self._declared[name] = found
        self.version += 1

    def _declarations(self, name: str) -> dict[str, list[Any]]:
        """What one plugin's hooks return, consumed at once so that an error is this plugin's."""
        found: dict[str, list[Any]] = {}
        for hook, kind in _HOOK_TYPES.items():
            caller = getattr(self._manager.hook, hook)
            functions = [impl.function for impl in caller.get_hookimpls() if impl.plugin_name == name]
            try:
                items = [item for function in functions for item in function()]
            except Exception as error:
                raise PluginError(f"{hook} failed: {type(error).__name__}: {error}") from error
            for item in items:
                if not isinstance(item, kind):
                    raise PluginError(f"{hook} returned {type(item).__name__}, wanted {kind.__name__}")
            found[hook] = items
        return found


_HOOK_TYPES: dict[str, type] = {
    "attnmux_backends": BackendInfo,
    "attnmux_platforms": Platform,
    "attnmux_compositions": Composition,
    "attnmux_orders": Insertion,
    "attnmux_health_checks": HealthCheck,
}


def _check_contract(plugin: object) -> None:
    declared = getattr(plugin, "attnmux_contract", None)
    ours = ".".join(map(str, hookspecs.CONTRACT))
    if declared is None:
        raise PluginError(f"declares no contract version: wanted attnmux_contract = {ours!r}")
    try:
        major, minor = (int(part) for part in str(declared).split("."))
    except ValueError:
        raise PluginError(f"attnmux_contract is {declared!r}, wanted two numbers such as {ours!r}") from None
    if major != hookspecs.CONTRACT[0] or minor > hookspecs.CONTRACT[1]:
        raise PluginError(f"speaks contract {declared}, this attnmux speaks {ours}: install versions that agree")


def _label(distribution: importlib.metadata.Distribution | None) -> str:
    return f"{distribution.name} {distribution.version}" if distribution else ""


def _resolve(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
