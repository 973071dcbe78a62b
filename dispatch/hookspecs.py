"""The hooks of attnmux. A plugin is any module (or object) with hook implementations and a contract version.

Plugins are found through the entry-point group ``attnmux``, or passed to :meth:`Registry.register`. Hooks take no
arguments and return declarations; they are called once, when the registry loads, and must import no kernel library.
Whatever a hook raises sets the whole plugin aside; ``attnmux doctor`` shows the error.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from attnmux.dispatch.claims import BackendInfo, Composition
from attnmux.dispatch.health import HealthCheck
from attnmux.dispatch.platform import Insertion, Platform

CONTRACT = (1, 0)
"""Version of everything a plugin sees. A plugin says ``attnmux_contract = "1.0"``; the major must be equal, the minor not above."""

hookspec = pluggy.HookspecMarker("attnmux")
hookimpl = pluggy.HookimplMarker("attnmux")


@hookspec
def attnmux_backends() -> Iterable[BackendInfo]:
    """Declare backends.

    **Example:**

    .. code-block:: python

        import attnmux.plugin as amx

        attnmux_contract = "1.0"

        @amx.hookimpl
        def attnmux_backends():
            yield amx.BackendInfo(
                name="acme",
                summary="ACME's fused attention",
                implementation="acme_attn.backend:AcmeBackend",
                requires=(amx.Package("acme-attn", ">=2"),),
                claims=(amx.Claim(device=amx.DeviceSet("cuda:sm90+"), head_size=amx.OneOf(64, 128),
                                  dtype=amx.OneOf(torch.bfloat16), page_size=amx.Range(16, 256, of=16)),),
            )

    Returns:
        Declarations. A name that is taken is an error that names both plugins.
    """
    return ()


@hookspec
def attnmux_platforms() -> Iterable[Platform]:
    """Declare platforms: which devices they recognise, their limits, and their orders.

    **Example:**

    .. code-block:: python

        @amx.hookimpl
        def attnmux_platforms():
            yield amx.Platform(
                name="cuda_sm90_lab",
                devices=amx.DeviceSet("cuda:sm90"),
                archs={"sm90": amx.Arch("Hopper", 232448, frozenset({"bf16", "tma"}))},
                orders=(amx.Order(("acme", "triton"), "measured here"),),
            )

    Returns:
        Declarations. Two platforms that list the same arch are an error.
    """
    return ()


@hookspec
def attnmux_compositions() -> Iterable[Composition]:
    """Name a ``{row class: backend}`` map, so that orders, prefer and require can use it.

    **Example:**

    .. code-block:: python

        @amx.hookimpl
        def attnmux_compositions():
            yield amx.Composition("triton_acme", (("image", "triton"), ("prefill", "acme"), ("decode", "acme")))

    Returns:
        Declarations. The parts may be backends of other plugins.
    """
    return ()


@hookspec
def attnmux_orders() -> Iterable[Insertion]:
    """Place a backend or composition in the platforms' orders. Without this it runs only where prefer or require name it.

    **Example:**

    .. code-block:: python

        @amx.hookimpl
        def attnmux_orders():
            yield amx.Insertion("acme", "1.3 times flashinfer on H100, 2026-11", before="flashinfer",
                                when=amx.when("cuda:sm90", row_class="decode"))

    Returns:
        Insertions, applied in the order of plugin names.
    """
    return ()


@hookspec
def attnmux_health_checks() -> Iterable[HealthCheck]:
    """Add checks to ``attnmux doctor``.

    **Example:**

    .. code-block:: python

        @amx.hookimpl
        def attnmux_health_checks():
            yield amx.HealthCheck("acme license", lambda: [amx.Finding("ok", "valid until 2027-01-01")])

    Returns:
        Checks. One that raises is shown as failed, with its error.
    """
    return ()
