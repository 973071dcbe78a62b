"""Options made from the fields of ``AttentionSpec`` and ``Limits``, and those that steer selection."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import typing
from typing import Any, Literal, get_args, get_origin

import torch

from attnmux.dispatch.cli import UsageError
from attnmux.dispatch.config import parse_names
from attnmux.dispatch.errors import complaint
from attnmux.dispatch.spec import SPEC_FIELDS, AttentionSpec, Limits
from attnmux.dispatch.steering import Names

_HINTS = typing.get_type_hints(AttentionSpec)
_HEADS = ("num_q_heads", "num_kv_heads")
OPTION_FIELDS = tuple(f for f in SPEC_FIELDS if f.name not in _HEADS)
"""Fields with an option of their own; the two head counts share ``--heads``."""
_WORDS = {("page_size", "packed"): None}
LIMIT_DEFAULTS = {"max_num_seqs": 256, "max_num_tokens": 8192, "max_seq_len": 131072, "max_query_len": 8192}


def add_spec_arguments(parser: argparse.ArgumentParser) -> None:
    """``--heads`` and one option for each other field of the spec."""
    helps = documented(AttentionSpec)
    group = parser.add_argument_group("what the layer needs")
    group.add_argument("--heads", required=True, metavar="Q/KV", help=helps["num_q_heads"])
    for field in OPTION_FIELDS:
        option, metavar = f"--{field.name.replace('_', '-')}", _metavar(field.name)
        required = field.default is dataclasses.MISSING
        flag: dict[str, Any] = {"nargs": "?", "const": "yes"} if _HINTS[field.name] is bool else {}
        group.add_argument(option, required=required, default=argparse.SUPPRESS, metavar=metavar, help=helps.get(field.name, ""), **flag)


def spec_from(args: argparse.Namespace) -> AttentionSpec:
    """The spec that the options describe.

    Raises:
        UsageError: a value of the wrong form or range, or a combination without meaning.
    """
    q_heads, _, kv_heads = args.heads.partition("/")
    values: dict[str, Any] = {
        "num_q_heads": _number("--heads", q_heads, int, "Q/KV, as in 32/8"),
        "num_kv_heads": _number("--heads", kv_heads or q_heads, int, "Q/KV, as in 32/8"),
    }
    values |= {f.name: parse_value(f.name, getattr(args, f.name)) for f in OPTION_FIELDS if hasattr(args, f.name)}
    try:
        return AttentionSpec(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def parse_value(name: str, text: str) -> Any:
    """A field's value from the form in which ``explain`` shows it: ``none``, ``yes``, ``8192,0``, ``bf16``, ``64``."""
    option = f"--{name.replace('_', '-')}"
    if (name, text) in _WORDS:
        return _WORDS[name, text]
    if text == "none":
        return None
    kinds = get_args(_HINTS[name]) or (_HINTS[name],)
    if bool in kinds and text in ("yes", "no"):
        return text == "yes"
    if tuple_kind := next((kind for kind in kinds if get_origin(kind) is tuple), None):
        parts = text.split(",")
        count = len(get_args(tuple_kind))
        if len(parts) != count:
            raise UsageError(complaint(option, repr(text), f"{count} numbers with a comma between"))
        return tuple(_number(option, part, int, f"{count} whole numbers") for part in parts)
    if int in kinds:
        return _number(option, text, int, "a whole number")
    if float in kinds:
        return _number(option, text, float, "a number")
    if bool in kinds and not any(get_origin(kind) is Literal for kind in kinds):
        raise UsageError(complaint(option, repr(text), "yes or no"))
    return text  # dtypes and words: the spec knows which it takes


def add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``Limits``."""
    helps = documented(Limits)
    group = parser.add_argument_group("the largest batch")
    for field in dataclasses.fields(Limits):
        default = LIMIT_DEFAULTS[field.name]
        option = f"--{field.name.replace('_', '-')}"
        group.add_argument(option, type=int, default=default, metavar="N", help=f"{helps[field.name]} (default: {default})")


def limits_from(args: argparse.Namespace) -> Limits:
    """The limits that the options describe.

    Raises:
        UsageError: a value below 1.
    """
    try:
        return Limits(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Limits)})
    except ValueError as error:
        raise UsageError(str(error)) from error


def add_steering_arguments(parser: argparse.ArgumentParser) -> None:
    """``--device`` and the verbs."""
    group = parser.add_argument_group("where, and what to use")
    group.add_argument("--device", metavar="DEVICE", help="cuda:0, cuda:sm100, rocm:mi300, xpu, cpu ... (default: the first one here)")
    for verb, meaning in (("prefer", "try these first"), ("require", "nothing else will do"), ("deny", "never these")):
        text = f"{meaning}: names, or CLASS=NAME with CLASS image, prefill or decode; repeatable, or with commas"
        group.add_argument(f"--{verb}", action="append", default=[], metavar="NAME", help=text)
    group.add_argument("--order", metavar="A>B>C", help="names, best first")


def steering_from(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of ``select`` and ``Attention``.

    Raises:
        ConfigError: names and CLASS=NAME are mixed in one verb.
    """
    verbs: dict[str, Names | None] = {verb: parse_names(",".join(getattr(args, verb)), f"--{verb}") for verb in ("prefer", "require", "deny")}
    return {**verbs, "order": args.order}


def documented(kind: type) -> dict[str, str]:
    """Field -> its sentence in the Args section of a class."""
    section = (inspect.getdoc(kind) or "").partition("Args:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + section):
        names, colon, text = entry.strip().partition(": ")
        plain = re.sub(r"\s+", " ", text).replace("``", "").replace("%", "%%")
        found |= dict.fromkeys((name.strip() for name in names.split(",")), plain) if colon else {}
    return found


def _metavar(name: str) -> str:
    hint = _HINTS[name]
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    words = [str(word) for word in get_args(hint) if isinstance(word, str)] or words
    if bool in kinds:
        return "|".join(["yes", "no", *words])
    if words:
        return "|".join(words)
    if any(get_origin(kind) is tuple for kind in kinds):
        return "N,N"
    plain = "DTYPE" if torch.dtype in kinds else "X" if float in kinds else "N"
    return "|".join([plain, *(word for field, word in _WORDS if field == name)])


def _number(option: str, text: str, kind: type[int] | type[float], wanted: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise UsageError(complaint(option, repr(text), wanted)) from None
