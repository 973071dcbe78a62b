"""The command line: ``attnmux`` and ``python -m attnmux``. One module a command, imported when the command is asked for."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

from attnmux._version import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "devices": ("attnmux.dispatch.cli.devices", "what is in this machine, and what can be asked about"),
    "backends": ("attnmux.dispatch.cli.backends", "the support matrix, generated from the declarations"),
    "explain": ("attnmux.dispatch.cli.explain", "which kernel would run which rows, and why every other one was passed over"),
    "reason": ("attnmux.dispatch.cli.reason", "what a reason code means"),
    "check": ("attnmux.dispatch.cli.check", "hold every backend of this machine against the oracle"),
    "doctor": ("attnmux.dispatch.cli.doctor", "what is installed, what is missing and how to get it"),
    "demo": ("attnmux.dispatch.demo.command", "serve prompts to a real language model through the selected route"),
    "warmup": ("attnmux.dispatch.cli.warmup", "compile or build whatever a spec within limits can reach"),
    "bench": ("attnmux.dispatch.cli.bench", "time every backend of this machine on one batch"),
}
"""Command -> the module with its ``add_arguments(parser)`` and ``run(args) -> int``, and its summary."""


class UsageError(Exception):
    """Wrong options; the message names the option, what was offered and what was wanted."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # one line instead of a screen of usage
        raise UsageError(f"{message} ({self.prog} --help lists the options)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments; by default the process's.

    Returns:
        The exit status: 0 for yes, 1 for no (nothing fits, a check failed), 2 for wrong options or settings.
    """
    from attnmux.dispatch.errors import AttnmuxError, ConfigError, UnknownDeviceError

    arguments = list(sys.argv[1:] if argv is None else argv)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)  # torch says so where NumPy, which nothing here needs, is absent
    try:
        args = _parse(arguments)
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except (UsageError, ConfigError, UnknownDeviceError) as error:
        return _complain(error, 2)
    except AttnmuxError as error:
        return _complain(error, 1)
    except BrokenPipeError:  # the reader has seen enough; what Python still holds must not complain at exit
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130


def _complain(error: Exception, status: int) -> int:
    print(f"attnmux: error: {error}", file=sys.stderr)
    return status


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parse; only the command that is named is imported, so that help and version cost nothing."""
    parser = _Parser(prog="attnmux", description="One attention call for LLM inference on any accelerator.")
    parser.add_argument("--version", action="version", version=f"attnmux {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, (module, summary) in COMMANDS.items():
        command = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == named:
            loaded = importlib.import_module(module)
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    return parser.parse_args(arguments)
