"""``attnmux doctor``: what is installed, what is missing and how to get it, and every plugin's state. Checks return findings."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Iterator

from attnmux.dispatch.claims import BackendInfo
from attnmux.dispatch.health import Finding, HealthCheck
from attnmux.dispatch.hookspecs import CONTRACT, hookimpl

attnmux_contract = ".".join(map(str, CONTRACT))


@hookimpl
def attnmux_health_checks() -> Iterable[HealthCheck]:
    return (
        HealthCheck("versions", _versions),
        HealthCheck("devices", _devices),
        HealthCheck("plugins", _plugins),
        HealthCheck("backends", _backends),
        HealthCheck("configuration", _configuration),
    )


def examine(checks: Iterable[HealthCheck]) -> list[tuple[str, Finding]]:
    """Run checks; one that raises becomes a failed finding."""
    report: list[tuple[str, Finding]] = []
    for check in checks:
        report.extend((check.name, finding) for finding in _run(check))
    return report


def _run(check: HealthCheck) -> list[Finding]:
    try:
        return list(check.run())
    except Exception as error:
        return [Finding("fail", f"the check itself failed: {type(error).__name__}: {error}")]


def _versions() -> Iterator[Finding]:
    from attnmux import __version__
    from attnmux.dispatch.requirements import Package

    yield Finding("ok", f"attnmux {__version__}, contract {attnmux_contract}, Python {platform.python_version()} on {sys.platform}")
    needed = [Package("torch", ">=2.8"), Package("pluggy", ">=1.7")]
    needed += [Package("triton", ">=3.4")] if sys.platform == "linux" else []
    for package in needed:
        found = package.probe()
        reason = package.judge(found)
        yield Finding("fail", str(reason), reason.todo) if reason else Finding("ok", f"{package.name} {found}")


def _devices() -> Iterator[Finding]:
    from attnmux.dispatch.host import devices

    for device in devices():
        index = "" if device.index is None else f" #{device.index}"
        status = "warn" if device.notes else "ok"
        yield Finding(status, f"{device.name}{index}: {device.title}, platform {device.platform}", "; ".join(device.notes))  # type: ignore[arg-type]


def _plugins() -> Iterator[Finding]:
    from attnmux.dispatch.host import registry

    records = registry().records.values()
    yield Finding("ok", f"{sum(r.origin == 'builtin' and r.state == 'active' for r in records)} built-in plugins active")
    for record in records:
        if record.origin == "builtin" and record.state == "active":
            continue
        label = f"{record.name} ({record.distribution or record.origin}): {record.state}"
        if record.state == "failed":
            shared = record.name.endswith(f" ({record.distribution})")  # another distribution's plugin has its name
            disable = record.distribution.partition(" ")[0] if shared else record.name
            yield Finding("fail", f"{label}: {record.error}", f"upgrade or uninstall it, or set ATTNMUX_DISABLE_PLUGINS={disable}")
        else:
            yield Finding("ok", label)


def _backends() -> Iterator[Finding]:
    from attnmux.dispatch.host import registry

    catalog = registry().catalog
    for name, info in catalog.backends.items():
        if name in catalog.broken:
            yield Finding("fail", f"{name}: failed to load: {catalog.broken[name]}")
        elif info.implementation is None:
            yield Finding("warn", f"{name}: declared, its code is not in this version yet")
        else:
            yield _readiness(info)


def _readiness(info: BackendInfo) -> Finding:
    """Whether a backend can run on a device of this machine, and what is missing otherwise."""
    from attnmux.dispatch.host import host

    here = host()
    claims = [claim for claim in info.claims if any(d.real and d in claim.device for d in here.devices)]
    wanted = [(*info.requires, *claim.requires) for claim in claims] or [info.requires]
    unmet = min((here.toolchain.unmet(requirements) for requirements in wanted), key=len)
    said, hint = "; ".join(map(str, unmet)), "; ".join(reason.todo for reason in unmet if reason.todo)
    if not claims:
        devices = info.devices().cell()
        return Finding("ok", f"{info.name}: for other devices ({devices})" + (f"; {said}" if said else ""), hint)
    return Finding("warn", f"{info.name}: {said}", hint) if unmet else Finding("ok", f"{info.name}: ready")


def _configuration() -> Iterator[Finding]:
    from attnmux.dispatch.config import base
    from attnmux.dispatch.host import registry
    from attnmux.dispatch.steering import combine

    settings = base()
    combine(settings.steerings, registry().catalog)
    yield Finding("ok", f"file: {settings.path or 'none'}; debug checks {'on' if settings.debug else 'off'}")
    for steering in settings.steerings:
        for verb in ("prefer", "require", "deny"):
            for pick in getattr(steering, verb):
                yield Finding("ok", f"{verb} {pick.name}{f' for {pick.row_class} rows' if pick.row_class else ''} ({pick.source})")
        for order in steering.orders:
            yield Finding("ok", f"order {' > '.join(order.names)} when {order.when} ({order.source}): {order.reason}")
