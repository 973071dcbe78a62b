"""The TOML file. Example::

prefer = { decode = "triton" }
deny = ["aiter"]

[[orders]]
names = ["flash_attn_3", "triton"]
reason = "measured on our H100s, 2026-11"
device = "cuda:sm90"
row_class = "decode"
when = { head_size = [128, 256], sliding_window = true, page_size = ">=32" }
q_len = [1, 4]
kv_len = [0, 8192]

[backends.flashinfer]
workspace_mb = 256
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from attnmux.dispatch.constraints import OFF, ON, Constraint, OneOf, Range
from attnmux.dispatch.errors import ConfigError, suggest
from attnmux.dispatch.platform import Band, Order, when
from attnmux.dispatch.query import QUERY_FIELDS
from attnmux.dispatch.spec import parse_dtype
from attnmux.dispatch.steering import Steering, steer

KEYS = ("prefer", "require", "deny", "order", "orders", "backends")
ORDER_KEYS = ("names", "reason", "device", "row_class", "when", "q_len", "kv_len")


def read_file(path: Path) -> Steering:
    """Read a config file.

    Raises:
        ConfigError: it is no TOML, or a key or value is wrong; names the file, the key and what is known.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"file {path} cannot be read: {error}") from error
    return parse_config(content, f"file {path}")


def parse_config(content: Mapping[str, Any], source: str) -> Steering:
    """The same from parsed content."""
    _check_keys(content, KEYS, source)
    order = content.get("order", [])
    if not isinstance(order, list | str):
        raise ConfigError(f"{source}: order is {order!r}, wanted a list of backend names")
    names = [order] if isinstance(order, str) else order
    tables = content.get("orders", [])
    if not isinstance(tables, list) or not all(isinstance(t, Mapping) for t in tables):
        raise ConfigError(f"{source}: orders must be tables, written [[orders]]")
    orders = [_order(table, f"{source}: orders[{i}]") for i, table in enumerate(tables)]
    backends = content.get("backends", {})
    if not isinstance(backends, Mapping) or not all(isinstance(section, Mapping) for section in backends.values()):
        raise ConfigError(f"{source}: backends must be tables, written [backends.NAME]")
    return steer(
        source,
        prefer=content.get("prefer"),
        require=content.get("require"),
        deny=content.get("deny"),
        order=[*orders, *names],
        options=backends,
    )


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}: {suggest(key, known)}")


def _order(table: Mapping[str, Any], where: str) -> Order:
    _check_keys(table, ORDER_KEYS, where)
    names = table.get("names")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"{where}: names is {names!r}, wanted a list of backend names")
    conditions = table.get("when", {})
    if not isinstance(conditions, Mapping):
        raise ConfigError(f"{where}: when is {conditions!r}, wanted a table of spec fields")
    _check_keys(conditions, QUERY_FIELDS[2:], f"{where}: when")
    fields = {field: parse_condition(field, value, where) for field, value in conditions.items()}
    row_class = table.get("row_class", ())
    if isinstance(row_class, list):
        row_class = tuple(row_class)
    for key, kind in (("device", str), ("reason", str), ("row_class", str | tuple)):
        value = row_class if key == "row_class" else table.get(key, "")
        if not isinstance(value, kind):
            raise ConfigError(f"{where}: {key} is {value!r}, wanted a string")
    try:
        condition = when(table.get("device"), row_class, **fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return Order(tuple(names), table.get("reason", "order given by the user"), condition, _band(table, "q_len", where), _band(table, "kv_len", where))


def _band(table: Mapping[str, Any], key: str, where: str) -> Band | None:
    if key not in table:
        return None
    value = table[key]
    if isinstance(value, str) and (found := re.fullmatch(r">=\s*(\d+)", value)):
        return int(found.group(1)), None
    whole = isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
    if not whole or value[0] > value[1] or value[0] < 0:
        raise ConfigError(f'{where}: {key} is {value!r}, wanted [lowest, highest] or ">=lowest"')
    return value[0], value[1]


def parse_condition(field: str, value: Any, where: str) -> Constraint:
    """A condition's value: true, false, a value, a list of values, or ``>=n``, ``<=n``, ``n..m``, ``%n``."""
    if isinstance(value, bool):
        return ON if value else OFF
    if isinstance(value, str) and (found := re.fullmatch(r"(?:>=\s*(\d+)|<=\s*(\d+)|(\d+)\.\.(\d+)|%\s*(\d+))", value)):
        least, most, lo, hi, step = (None if g is None else int(g) for g in found.groups())
        return Range(least or lo or 0, most if hi is None else hi, step or 1)
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(v, str | int | float) for v in values):
        raise ConfigError(f"{where}: {field} is {value!r}, wanted true, false, a value, a list of values or a range such as '>=64'")
    if field in ("dtype", "q_dtype", "kv_dtype"):
        try:
            return OneOf(*(parse_dtype(v, field) for v in values))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    return OneOf(*values)
