"""``attnmux warmup``."""

from __future__ import annotations

import argparse
import time

from attnmux.dispatch.attention import Attention
from attnmux.dispatch.backend import Backend
from attnmux.dispatch.cli import UsageError
from attnmux.dispatch.cli.output import add_json, print_json
from attnmux.dispatch.cli.spec_options import (
    add_limit_arguments,
    add_spec_arguments,
    add_steering_arguments,
    limits_from,
    spec_from,
    steering_from,
)
from attnmux.dispatch.devices import resolve
from attnmux.dispatch.host import host, registry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_spec_arguments(parser)
    add_limit_arguments(parser)
    add_steering_arguments(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    spec, limits = spec_from(args), limits_from(args)
    attention = Attention(spec, real_device(args.device), limits=limits, **steering_from(args))
    start = time.perf_counter()
    attention.warmup()
    seconds = time.perf_counter() - start
    workspace = attention.workspace_bytes()
    done = {name: _done(attention.backend(name)) for name in attention.backends}
    if args.json:
        values = {"device": attention.selection.device.name, "routes": attention.selection.routes, "backends": done}
        print_json("warmup", {**values, "seconds": round(seconds, 3), "workspace_bytes": workspace})
        return 0
    print(f"{attention.selection.name} on {attention.selection.device.name}: {seconds:.2f} s, workspace {workspace} bytes")
    for name, what in done.items():
        print(f"  {name}: {what}")
    return 0


def real_device(name: str | None) -> str | None:
    """The name, if this machine has the device.

    Raises:
        UsageError: it can only be asked about.
    """
    device = resolve(name, registry().catalog, host().devices)
    if not device.real:
        raise UsageError(f"--device is {device.name}, wanted a device of this machine; explain answers dry runs, only a real device can run")
    return name


def _done(backend: Backend) -> str:
    if type(backend).warmup is Backend.warmup:
        return "nothing to compile or build"
    return "compiled or built what the limits can reach"
