"""What the active plugins declare, together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from attnmux.dispatch.claims import BackendInfo, Composition
from attnmux.dispatch.errors import PluginError
from attnmux.dispatch.health import HealthCheck
from attnmux.dispatch.platform import Insertion, Platform
from attnmux.dispatch.spec import RowClass


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything the active plugins declare. A value: the registry makes a new one when anything changes."""

    backends: dict[str, BackendInfo] = field(default_factory=dict)
    platforms: dict[str, Platform] = field(default_factory=dict)
    compositions: dict[str, Composition] = field(default_factory=dict)
    insertions: tuple[Insertion, ...] = ()
    health_checks: tuple[HealthCheck, ...] = ()
    providers: dict[str, str] = field(default_factory=dict)
    """Name of a backend, platform or composition -> name of the plugin that declares it."""
    broken: dict[str, str] = field(default_factory=dict)
    """Backends whose implementation failed to load -> the error."""

    def part(self, name: str, row_class: RowClass) -> str | None:
        """The backend that a name stands for: a backend for itself, a composition for its part."""
        composition = self.compositions.get(name)
        return name if composition is None else composition.part(row_class)

    def names(self) -> list[str]:
        """Names that prefer, require, deny and orders may use."""
        return sorted((*self.backends, *self.compositions))


_Named = TypeVar("_Named", BackendInfo, Platform, Composition)


def merged(catalog: Catalog, plugin: str, found: dict[str, list[Any]]) -> Catalog:
    """The catalog with one plugin's declarations added.

    Raises:
        PluginError: a name or an arch is taken; says by whom.
    """
    providers = dict(catalog.providers)

    def add(known: dict[str, _Named], new: list[_Named]) -> dict[str, _Named]:
        both = dict(known)
        for item in new:
            if item.name in providers:
                raise PluginError(f"the name {item.name!r} is taken: declared by {providers[item.name]} and by {plugin}")
            providers[item.name] = plugin
            both[item.name] = item
        return both

    listed = {arch: f"{p.name} ({providers[p.name]})" for p in catalog.platforms.values() for arch in p.archs}
    for platform in found["attnmux_platforms"]:
        for arch in platform.archs:
            if arch in listed:
                raise PluginError(f"arch {arch} is listed by platform {listed[arch]} and by {platform.name} ({plugin})")
            listed[arch] = f"{platform.name} ({plugin})"
    return Catalog(
        backends=add(catalog.backends, found["attnmux_backends"]),
        platforms=add(catalog.platforms, found["attnmux_platforms"]),
        compositions=add(catalog.compositions, found["attnmux_compositions"]),
        insertions=tuple(sorted((*catalog.insertions, *(_signed(i, plugin) for i in found["attnmux_orders"])), key=lambda i: i.source)),
        health_checks=(*catalog.health_checks, *found["attnmux_health_checks"]),
        providers=providers,
        broken=catalog.broken,
    )


def _signed(insertion: Insertion, plugin: str) -> Insertion:
    return Insertion(insertion.name, insertion.reason, insertion.before, insertion.when, source=f"plugin {plugin}")
