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
kernel = "fa2"
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnmux.dispatch.constraints import OFF, ON, Constraint, OneOf, Range, either
from attnmux.dispatch.errors import ConfigError, suggest
from attnmux.dispatch.platform import Band, Order, when
from attnmux.dispatch.query import QUERY_FIELDS
from attnmux.dispatch.spec import CHOICES, parse_dtype
from attnmux.dispatch.steering import Steering, split_order, steer

KEYS = ("prefer", "require", "deny", "order", "orders", "backends")
ORDER_KEYS = ("names", "reason", "device", "row_class", "when", "q_len", "kv_len")


def read_file(path: Path) -> Steering:
    """Read a config file.

    Raises:
        ConfigError: it is no TOML, or a key or value is wrong; names the file, the key and what is known.
    """
    if sys.version_info >= (3, 11):  # here, because most processes have no file to read
        import tomllib
    else:
        import tomli as tomllib
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
    names = split_order(order) if isinstance(order, str) else order
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
        bands = _band(table, "q_len", where), _band(table, "kv_len", where)
        return Order(tuple(names), table.get("reason", "order given by the user"), condition, *bands)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from error


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


_DTYPES = ("dtype", "q_dtype", "kv_dtype")
_CHOICES: dict[str, tuple[object, ...]] = {**CHOICES, "lengths": ("exact", "upper_bound")}
_SWITCHES = ("chunk", "sinks", "sparse", "return_lse", "batch_invariant", "kv_scale", "alibi", "mm_prefix")
_OPTIONAL_NUMBERS = ("page_size", "sliding_window", "window_right", "softcap", "rswa_window")
_NUMBERS = ("group", "num_q_heads", "num_kv_heads", "head_size", "v_head_size", "scale", *_OPTIONAL_NUMBERS)
_RANGE = re.compile(r">=\s*(?P<least>\d+)|<=\s*(?P<most>\d+)|(?P<lo>\d+)\.\.(?P<hi>\d+)|%\s*(?P<step>[1-9]\d*)")


def parse_condition(field: str, value: Any, where: str) -> Constraint:
    """A condition's value: true, false, a value, a list of values, or for numbers ``>=n``, ``<=n``, ``n..m``, ``%n``.

    Raises:
        ConfigError: the field cannot have it. A misspelt value would match nothing, in silence.
    """
    if isinstance(value, bool) and field in (*_SWITCHES, *_OPTIONAL_NUMBERS):
        return ON if value else OFF
    if isinstance(value, str) and field in _NUMBERS and (found := _RANGE.fullmatch(value)):
        part = {key: int(text) for key, text in found.groupdict().items() if text is not None}
        return Range(part.get("least", part.get("lo", 0)), part.get("most", part.get("hi")), part.get("step", 1))
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ConfigError(f"{where}: when.{field} is an empty list, wanted {_wanted(field)}")
    return OneOf(*(_value(field, item, where) for item in values))


def _value(field: str, value: Any, where: str) -> Any:
    if field in _DTYPES and isinstance(value, str):
        try:
            return parse_dtype(value, field)
        except ValueError as error:
            raise ConfigError(f"{where}: when.{error}") from error
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number if field in _NUMBERS else type(value) in (str, bool) and value in _CHOICES.get(field, ())):
        raise ConfigError(f"{where}: when.{field} is {value!r}, wanted {_wanted(field)}")
    return value


def _wanted(field: str) -> str:
    if field in _DTYPES:
        return "a dtype such as 'bf16', or a list of them"
    if field in _NUMBERS:
        return ("true, false, " if field in _OPTIONAL_NUMBERS else "") + "a number, a list of numbers or a range such as '>=64'"
    words = [repr(choice) if isinstance(choice, str) else str(choice).lower() for choice in _CHOICES.get(field, ()) if choice is not None]
    return either(tuple(dict.fromkeys([*(["true", "false"] if field in _SWITCHES else []), *words])))
