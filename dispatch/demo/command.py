"""``attnmux demo``: a real language model served through the selected route, and checked."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from attnmux.dispatch.cli import UsageError
from attnmux.dispatch.cli.output import add_json, console, print_json
from attnmux.dispatch.cli.spec_options import add_steering_arguments, steering_from
from attnmux.dispatch.demo.check import compare
from attnmux.dispatch.demo.display import Decode, Display, Lines, LiveTable, Silent, print_line
from attnmux.dispatch.demo.engine import Engine
from attnmux.dispatch.demo.pool import PagePool
from attnmux.dispatch.demo.prompts import PROMPTS, read_prompts
from attnmux.dispatch.demo.report import Report, verdict_line
from attnmux.dispatch.demo.request import Request
from attnmux.dispatch.demo.runner import ModelRunner
from attnmux.dispatch.demo.scheduler import Scheduler
from attnmux.dispatch.demo.weights import MissingPackages, find_weights, load, stay_offline
from attnmux.dispatch.errors import AttnmuxError, complaint
from attnmux.dispatch.spec import DTYPE_NAMES, Limits, parse_dtype


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``attnmux demo``."""
    add_steering_arguments(parser)
    parser.add_argument("--dtype", default="fp32", help="of weights, keys and values (default: fp32, the one that is checked)")
    for name, default, what in (
        ("--max-new-tokens", 64, "for each prompt"),
        ("--token-budget", 256, "query tokens in a step"),
        ("--page-size", 16, "tokens in a page"),
        ("--pages", 96, "pages in the cache"),
    ):
        parser.add_argument(name, metavar="N", type=int, default=default, help=f"{what} (default: {default})")
    parser.add_argument("--prompts", metavar="FILE", type=Path, help="one prompt a line (default: eight of very different lengths)")
    parser.add_argument("--no-check", action="store_true", help="do not compare with transformers' eager attention")
    parser.add_argument("--quiet", action="store_true", help="print the summary and the check only")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Serve the prompts, report, check.

    Returns:
        0; 1 when a token differs from eager; 2 when a package is missing.

    Raises:
        UsageError: an argument is wrong, or a prompt does not fit the cache.
        NoBackendError: nothing can run the model's attention.
    """
    try:
        report = serve(args)
    except MissingPackages as error:
        print(error, file=sys.stderr)
        return 2
    except AttnmuxError:  # some are ValueErrors too
        raise
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json("demo", report.to_dict())
    return 0 if report.passed else 1


def serve(args: argparse.Namespace) -> Report:
    """Load, serve, show, check."""
    stay_offline()
    dtype, steering = parse_dtype(args.dtype, "--dtype"), steering_from(args)
    prompts = PROMPTS if args.prompts is None else read_prompts(args.prompts)
    if args.max_new_tokens < 1:
        raise ValueError(complaint("--max-new-tokens", args.max_new_tokens, "at least 1"))
    scheduler = Scheduler(PagePool(args.pages, args.page_size), args.token_budget, len(prompts))
    file = find_weights()
    screen, chatty = console(), not (args.json or args.quiet)
    with _waiting(screen, f"loading {file.name}", chatty):
        model, tokenizer = load(file, dtype)
    stop = _stop_tokens(model)
    requests = [Request(i, prompt.encode(tokenizer), args.max_new_tokens, stop) for i, prompt in enumerate(prompts)]
    limits = Limits(scheduler.max_num_seqs, args.token_budget, args.pages * args.page_size, args.token_budget)
    engine = Engine(ModelRunner(model, args.pages, args.page_size, limits, device=args.device, **steering), scheduler)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    start = time.perf_counter()
    with _display(engine, requests, decode, screen, chatty) as display:
        for rows in engine.run(requests):
            display.show(rows)
    report = Report(file.stem, engine, requests, decode, time.perf_counter() - start)
    lines = [] if args.json else [*report.lines(), *_without_check(args, dtype)]
    for line in lines:
        print_line(screen, line)
    if args.no_check or dtype != torch.float32:
        return report
    verdicts = []
    for verdict in compare(model, requests):
        verdicts.append(verdict)
        if not args.json:
            print_line(screen, verdict_line(verdict, requests[verdict.index], decode))
    return replace(report, verdicts=verdicts)


def _stop_tokens(model: Any) -> frozenset[int]:
    """The ids at which ``model.generate`` would stop."""
    ids = model.generation_config.eos_token_id
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)


def _display(engine: Engine, requests: list[Request], decode: Decode, screen: Console, chatty: bool) -> Display:
    if not chatty:
        return Silent()
    return (LiveTable if screen.is_terminal else Lines)(engine, requests, decode, screen)


def _without_check(args: argparse.Namespace, dtype: torch.dtype) -> list[str]:
    if args.no_check or dtype == torch.float32:
        return []
    return [f"check       none in {DTYPE_NAMES[dtype]}: rounding decides between close tokens; use --dtype fp32"]


@contextmanager
def _waiting(screen: Console, what: str, chatty: bool) -> Iterator[None]:
    """A spinner on a terminal, a line elsewhere."""
    if not chatty:
        yield
    elif screen.is_terminal:
        with screen.status(what):
            yield
    else:
        print_line(screen, what)
        yield
