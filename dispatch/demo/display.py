"""What the demo shows while it runs: a live table on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from attnmux.dispatch.demo.engine import Engine
from attnmux.dispatch.demo.request import Request, State
from attnmux.dispatch.demo.scheduler import ScheduledRow

Decode = Callable[[Sequence[int]], str]


class Display(Protocol):
    """A context manager that is told of every step."""

    def __enter__(self) -> Display: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
    def show(self, rows: Sequence[ScheduledRow]) -> None:
        """After a step, with the rows it ran."""


def status(request: Request) -> str:
    """What a request is doing, in a few words."""
    if request.state == "finished":
        return "done"
    if request.state == "waiting":
        return "preempted" if request.preemptions else "waiting"
    return "decode" if request.decoding else f"prefill {request.computed}/{request.num_tokens}"


def print_line(console: Console, line: str) -> None:
    """A line as it is: nothing in it is markup, and it is not cut."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def show(self, rows: Sequence[ScheduledRow]) -> None:
        return None


class Lines(Silent):
    """A line when a request starts, loses its pages, or ends."""

    def __init__(self, engine: Engine, requests: Sequence[Request], decode: Decode, console: Console) -> None:
        self._engine, self._requests, self._decode, self._console = engine, requests, decode, console
        self._shown: dict[Request, State] = {}

    def show(self, rows: Sequence[ScheduledRow]) -> None:
        for request in self._requests:
            if request.state != self._shown.get(request, "waiting"):
                self._shown[request] = request.state
                self._print(request, {"running": "starts", "finished": "done", "waiting": "preempted"}[request.state])

    def _print(self, request: Request, event: str) -> None:
        line = f"step {self._engine.counters.steps}: request {request.index} {event}, {len(request.prompt)} prompt tokens"
        if event == "done":
            line += f", {len(request.generated)} new: {' '.join(self._decode(request.generated).split())}"
        print_line(self._console, line)


class LiveTable(Silent):
    """Every request's state and the end of its text, redrawn as tokens come."""

    def __init__(self, engine: Engine, requests: Sequence[Request], decode: Decode, console: Console) -> None:
        self._engine, self._requests, self._decode = engine, requests, decode
        self._live = Live(self._table(()), console=console, auto_refresh=False)

    def __enter__(self) -> LiveTable:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, rows: Sequence[ScheduledRow]) -> None:
        self._live.update(self._table(rows), refresh=True)

    def _table(self, rows: Sequence[ScheduledRow]) -> Table:
        pool, counters = self._engine.pool, self._engine.counters
        decode = sum(row.q_len == 1 for row in rows)
        table = Table(title=self._route(), expand=True, title_justify="left", caption_justify="left")
        table.caption = f"step {counters.steps}: {len(rows)} rows, {decode} of one token; pages {pool.used}/{pool.num_pages}"
        for name, width in (("request", 7), ("state", 16), ("tokens", 10)):
            table.add_column(name, width=width, no_wrap=True)
        table.add_column("text", no_wrap=True, overflow="ellipsis", ratio=1)
        for request in self._requests:
            style = {"finished": "green", "waiting": "dim"}.get(request.state, "")
            count = f"{len(request.prompt)}+{len(request.generated)}"
            table.add_row(str(request.index), status(request), count, Text(self._tail(request)), style=style)
        return table

    def _tail(self, request: Request) -> str:
        """The last words, as many as a wide terminal's line has room for."""
        text = " ".join(self._decode(request.generated[-60:]).split())
        return text if request.state == "finished" else text[-100:]

    def _route(self) -> str:
        return "; ".join(f"{s.name} on {s.device.name}" for s in self._engine.runner.selections)
