"""The two doors to the checks: a plain function, and a pytest parametrization over the same list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from attnmux.dispatch import host
from attnmux.dispatch.claims import BackendInfo
from attnmux.dispatch.device import Device
from attnmux.dispatch.devices import known_names, resolve
from attnmux.dispatch.errors import ConfigError, suggest
from attnmux.testing import call_errors, declaration, invariance, numerics, refusals, sensitivity
from attnmux.testing.check import Check, Report, Result, run_checks
from attnmux.testing.sampling import Subject

if TYPE_CHECKING:
    import pytest

DRY = (declaration, refusals)
"""Concerns that need no hardware."""
REAL = (numerics, sensitivity, invariance, call_errors)


def backend_checks(name: str, device: str | torch.device | Device | None = None, *, quick: bool = False, seed: int = 0) -> Iterator[Check]:
    """Every promise of a backend as a check.

    Args:
        name: a registered backend.
        device: where to run; by default the first device of this machine that it can run on. Where it cannot run, only
            its declaration and its refusals are checked, on a device that it names.
        quick: each size and feature alone, fewer combinations.
        seed: of all inputs.

    Raises:
        ConfigError: no plugin declares the backend.
    """
    yield from _checks(subject_of(name, device, quick=quick, seed=seed))


def check_backend(
    name: str,
    device: str | torch.device | Device | None = None,
    *,
    quick: bool = False,
    seed: int = 0,
    expected_failures: Mapping[str, str] | None = None,
    progress: Callable[[Result], None] | None = None,
) -> Report:
    """Run every check of a backend.

    Args:
        name, device, quick, seed: as for :func:`backend_checks`.
        expected_failures: check id -> reason, for what is known to fail; one that passes counts as a failure, and ids
            that no check has are reported.
        progress: told of each result.

    Raises:
        ConfigError: no plugin declares the backend.
    """
    subject = subject_of(name, device, quick=quick, seed=seed)
    return run_checks(name, subject.device.name, subject.stopped, _checks(subject), expected_failures or {}, progress)


def parametrize_backend_checks(
    *names: str,
    device: str | torch.device | Device | None = None,
    quick: bool = False,
    seed: int = 0,
    expected_failures: Mapping[str, str] | None = None,
) -> pytest.MarkDecorator:
    """Decorates a pytest test that takes ``check`` and calls ``check.run()``.

    Args:
        names: registered backends.
        device, quick, seed, expected_failures: as for :func:`check_backend`; ids that no check has warn.
    """
    import pytest

    expected = dict(expected_failures or {})
    checks = [check for name in names for check in backend_checks(name, device, quick=quick, seed=seed)]
    warn_of_stale(expected, checks)
    params = []
    for check in checks:
        marks = [pytest.mark.xfail(reason=expected[check.id], strict=True)] if check.id in expected else []
        params.append(pytest.param(check, id=f"{check.backend}/{check.id}", marks=marks))
    return pytest.mark.parametrize("check", params)


def warn_of_stale(expected: Mapping[str, str], checks: list[Check]) -> None:
    """Warn of expected failures whose ids no check has."""
    import warnings

    known = {check.id for check in checks}
    for stale in sorted(set(expected) - known):
        warnings.warn(f"the expected failure {stale!r} matches no check: {suggest(stale, sorted(known))[:200]}", UserWarning, stacklevel=3)


def subject_of(name: str, device: str | torch.device | Device | None = None, *, quick: bool = False, seed: int = 0) -> Subject:
    """The backend and the device on which to judge it.

    Raises:
        ConfigError: no plugin declares the backend.
        UnknownDeviceError: the device is not recognised.
    """
    registry, here = host.registry(), host.host()
    info = registry.catalog.backends.get(name)
    if info is None:
        raise ConfigError(f"unknown backend {name!r}: {suggest(name, sorted(registry.catalog.backends))}")
    chosen = resolve(device, registry.catalog, here.devices) if device is not None else _device_for(info, here)
    asked = (chosen,) if device is not None or chosen.real or not here.devices else here.devices  # nothing runs here: say so of what is here
    return Subject(info, chosen, here.toolchain, seed, quick, "; ".join(dict.fromkeys(why_stopped(info, d, here) for d in asked)))


def why_stopped(info: BackendInfo, device: Device, here: host.Host) -> str:
    """Why a backend cannot run on a device, or nothing."""
    if not device.real:
        return f"{device.name} is not in this machine"
    if info.implementation is None:
        return "its code is not in this version yet"
    if info.name in host.registry().catalog.broken:
        return f"it failed to load: {host.registry().catalog.broken[info.name]}"
    claims = [claim for claim in info.claims if device in claim.device]
    if not claims:
        return f"it claims nothing for {device.name}"
    unmet = here.toolchain.unmet(info.requires)
    unmet += min((here.toolchain.unmet(claim.requires) for claim in claims), key=len)
    return "; ".join(map(str, unmet))


def _device_for(info: BackendInfo, here: host.Host) -> Device:
    """The first device here on which it runs, else one that it names, rather one that this machine lacks."""
    catalog = host.registry().catalog
    known = (*(resolve(name, catalog, here.devices) for name in known_names(catalog)), *here.devices)
    running = (device for device in here.devices if not why_stopped(info, device, here))
    named = (device for device in sorted(known, key=lambda device: device.real) if any(device in claim.device for claim in info.claims))
    return next(running, None) or next(named, None) or resolve("cpu", catalog, here.devices)


def _checks(subject: Subject) -> Iterator[Check]:
    for concern in DRY if subject.stopped else (*DRY, *REAL):
        yield from concern.checks(subject)
