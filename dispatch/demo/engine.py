"""The loop: schedule, compute, accept tokens, free what is finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from attnmux.dispatch.demo.pool import PagePool
from attnmux.dispatch.demo.request import Request
from attnmux.dispatch.demo.runner import ModelRunner
from attnmux.dispatch.demo.scheduler import ScheduledRow, Scheduler


@dataclass(slots=True)
class Counters:
    """What a run did. A step with part of a prompt counts as prefill time, however many rows decode in it.

    Args:
        steps: forwards of the model.
        mixed_steps: those with decode rows and parts of prompts together.
        prompt_tokens: computed tokens of prompts, and of what had been generated when a request was preempted.
        decode_tokens: computed tokens of decode rows, in whatever step.
        pure_decode_tokens: those of steps without parts of prompts.
        prefill_seconds, decode_seconds: time of steps with and without parts of prompts.
    """

    steps: int = 0
    mixed_steps: int = 0
    prompt_tokens: int = 0
    decode_tokens: int = 0
    pure_decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def record(self, rows: list[ScheduledRow], seconds: float) -> None:
        """Count a step, before its tokens are accepted."""
        decode = sum(row.request.decoding for row in rows)
        prompt = sum(row.q_len for row in rows if not row.request.decoding)
        self.steps += 1
        self.mixed_steps += bool(decode and prompt)
        self.prompt_tokens += prompt
        self.decode_tokens += decode
        if prompt:
            self.prefill_seconds += seconds
        else:
            self.pure_decode_tokens += decode
            self.decode_seconds += seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Engine:
    """Serves requests until all are finished.

    Args:
        runner: computes a step.
        scheduler: chooses it.
        clock: seconds, for the counters.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.counters = Counters()
        self._clock = clock

    @property
    def pool(self) -> PagePool:
        return self.scheduler.pool

    def run(self, requests: list[Request]) -> Iterator[list[ScheduledRow]]:
        """Serve the requests, pausing after every step with the rows it ran.

        Raises:
            ValueError: a request can never fit; none has been served then.
        """
        for request in requests:
            self.scheduler.add(request)
        while rows := self.scheduler.schedule():
            self.step(rows)
            yield rows

    def step(self, rows: list[ScheduledRow]) -> None:
        """Compute rows and accept their new tokens."""
        start = self._clock()
        tokens = iter(self.runner.step(rows))
        self.counters.record(rows, self._clock() - start)
        for row in rows:
            samples = row.samples  # before its tokens count as computed
            row.request.computed += row.q_len
            if samples and row.request.accept(next(tokens)):
                self.scheduler.finish(row.request)
