"""Where wishes come from: ``with attnmux.config(...)``, the environment (``ATTNMUX_*``) and a TOML file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from attnmux.dispatch.config_file import read_file
from attnmux.dispatch.errors import ConfigError, suggest
from attnmux.dispatch.platform import Order
from attnmux.dispatch.steering import Names, Steering, steer

VARIABLES: dict[str, str] = {
    "ATTNMUX_PREFER": "backends to try first: triton, or decode=triton,prefill=flashinfer",
    "ATTNMUX_REQUIRE": "the only backend that will do: triton, or decode=triton",
    "ATTNMUX_DENY": "backends never to use: aiter,flex",
    "ATTNMUX_ORDER": "an order for every device and row class: triton>flashinfer>flex",
    "ATTNMUX_CONFIG": "a TOML file to read instead of the one in the user's config folder; empty for none",
    "ATTNMUX_DEBUG": "1 also checks on accelerators what would synchronise: slots, page ids, scales",
    "ATTNMUX_DISABLE_PLUGINS": "plugins or distributions never to import: acme,acme-attn",
}
"""Every environment variable, with what it means. Any other ``ATTNMUX_*`` is an error."""


@dataclass(frozen=True, slots=True)
class Base:
    """The environment and the file, read once."""

    steerings: tuple[Steering, ...]
    debug: bool
    disabled: tuple[str, ...]
    path: Path | None


@contextmanager
def config(
    *,
    prefer: Names | None = None,
    require: Names | None = None,
    deny: Names | None = None,
    order: Sequence[str | Order] | str | None = None,
    backends: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[None]:
    """Steer every selection made inside the ``with`` block, above the environment and the file, below arguments.

    Args:
        prefer: backends or compositions to try first.
        require: the only one that will do.
        deny: never.
        order: names, best first, or :class:`attnmux.plugin.Order` entries with conditions and bands.
        backends: options of backends, ``{name: {option: value}}``.

    Raises:
        ConfigError: a value of the wrong form. Unknown names are reported by the first selection inside.
    """
    inner = steer("context", prefer=prefer, require=require, deny=deny, order=order, options=backends)
    token = _context.set((inner, *_context.get()))
    try:
        yield
    finally:
        _context.reset(token)


_context: ContextVar[tuple[Steering, ...]] = ContextVar("attnmux_config", default=())


def context() -> tuple[Steering, ...]:
    """The steerings of the ``with`` blocks around the caller, innermost first."""
    return _context.get()


def reload_config() -> None:
    """Read the environment and the file again, and look at the machine again."""
    base.cache_clear()
    from attnmux.dispatch import host

    host.reset()


@lru_cache(maxsize=1)
def base() -> Base:
    """The environment and the file.

    Raises:
        ConfigError: an unknown ``ATTNMUX_*`` variable, an unreadable file, or a wrong value in either.
    """
    return read_base(os.environ)


def debug() -> bool:
    """Whether checks that synchronise run on accelerators too."""
    return base().debug


def read_base(environ: Mapping[str, str]) -> Base:
    """The same from any mapping, for tests."""
    for name in sorted(environ):
        if name.startswith("ATTNMUX_") and name not in VARIABLES:
            raise ConfigError(f"unknown environment variable {name}: {suggest(name, list(VARIABLES))}")
    path = _path(environ)
    steerings = [
        steer(
            "environment",
            prefer=parse_names(environ.get("ATTNMUX_PREFER", ""), "ATTNMUX_PREFER"),
            require=parse_names(environ.get("ATTNMUX_REQUIRE", ""), "ATTNMUX_REQUIRE"),
            deny=parse_names(environ.get("ATTNMUX_DENY", ""), "ATTNMUX_DENY"),
            order=environ.get("ATTNMUX_ORDER") or None,
        )
    ]
    if path is not None:
        steerings.append(read_file(path))
    disabled = tuple(name.strip() for name in environ.get("ATTNMUX_DISABLE_PLUGINS", "").split(",") if name.strip())
    return Base(tuple(steerings), _flag(environ, "ATTNMUX_DEBUG"), disabled, path)


def _path(environ: Mapping[str, str]) -> Path | None:
    named = environ.get("ATTNMUX_CONFIG")
    if named is not None:
        if not named:
            return None
        path = Path(named).expanduser()
        if not path.is_file():
            raise ConfigError(f"ATTNMUX_CONFIG names {named}, which is no file: correct it, or set it to nothing for no file")
        return path
    import platformdirs  # 10 ms that most calls with ATTNMUX_CONFIG need not pay

    path = platformdirs.user_config_path("attnmux") / "config.toml"
    return path if path.is_file() else None


def parse_names(text: str, where: str) -> Names | None:
    """``a,b`` as a list, ``decode=a,prefill=b`` as a mapping, nothing as ``None``.

    Raises:
        ConfigError: both forms are mixed; ``where`` says in what.
    """
    text = text.strip()
    if not text:
        return None
    plain: list[str] = []
    by_class: dict[str, list[str]] = {}
    for item in (part.strip() for part in text.split(",")):
        row_class, equals, backend = item.partition("=")
        if equals:
            by_class.setdefault(row_class.strip(), []).append(backend.strip())
        else:
            plain.append(item)
    if plain and by_class:
        raise ConfigError(f"{where} is {text!r}, wanted either names or row_class=name entries, not both")
    return by_class or plain


def _flag(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "0").strip().lower()
    values = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False, "": False}
    if text not in values:
        raise ConfigError(f"{name} is {text!r}, wanted 1 or 0")
    return values[text]
