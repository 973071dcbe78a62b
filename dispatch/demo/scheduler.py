"""Which tokens run in a step: decode rows and chunks of prompts together, under a token budget.

Requests are served in order of arrival, and one is admitted only when the prompts before it are done, so that no decode row ever
waits for a prompt. A request takes pages for all its known tokens when it is admitted, and one page at a time while it decodes.
When none is left, the youngest running request gives its pages back and starts over later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from attnmux.dispatch.demo.pool import PagePool
from attnmux.dispatch.demo.request import Request
from attnmux.dispatch.errors import complaint


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """``q_len`` tokens of a request, from its first one that is not computed."""

    request: Request
    q_len: int

    @property
    def seq_len(self) -> int:
        """Keys it will have, those of this step included."""
        return self.request.computed + self.q_len

    @property
    def samples(self) -> bool:
        """Whether the step brings it to its last token, so that the next one can be chosen."""
        return self.q_len == self.request.pending


class Scheduler:
    """Continuous batching.

    Args:
        pool: the cache's pages.
        token_budget: query tokens in a step at most.
        max_num_seqs: rows in a step at most.

    Attributes:
        waiting, running: requests, oldest first.
    """

    def __init__(self, pool: PagePool, token_budget: int, max_num_seqs: int) -> None:
        for name, value in (("token_budget", token_budget), ("max_num_seqs", max_num_seqs)):
            if value < 1:
                raise ValueError(complaint(name, value, "at least 1"))
        self.pool = pool
        self.token_budget = token_budget
        self.max_num_seqs = min(max_num_seqs, token_budget)  # every running row can have its decode token
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it has no prompt, or would not fit the cache even alone.
        """
        if not request.prompt:
            raise ValueError(complaint(f"prompt of request {request.index}", "empty", "at least one token"))
        longest = len(request.prompt) + request.max_new_tokens
        if (pages := self.pool.pages_for(longest)) > self.pool.num_pages:
            raise ValueError(complaint(f"request {request.index}", f"up to {longest} tokens, {pages} pages", f"at most {self.pool.num_pages} pages"))
        self.waiting.append(request)

    def schedule(self) -> list[ScheduledRow]:
        """The next step's rows; empty when nothing is left to do."""
        rows: list[ScheduledRow] = []
        budget = self.token_budget
        position = 0
        while position < len(self.running):
            request = self.running[position]
            if not self._make_room(request):  # it was the youngest itself and is waiting again
                break
            rows.append(ScheduledRow(request, min(request.pending, budget)))  # only the youngest has tokens of its prompt left
            budget -= rows[-1].q_len
            position += 1
        while budget and self._admit():
            request = self.running[-1]
            rows.append(ScheduledRow(request, min(request.pending, budget)))
            budget -= rows[-1].q_len
        return rows

    def finish(self, request: Request) -> None:
        """Take a request out; its pages make room for others."""
        self.running.remove(request)
        self.pool.give_back(request.pages)
        request.state = "finished"

    def _admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        request = self.waiting[0]
        needed = self.pool.pages_for(request.num_tokens)
        if needed + len(self.running) > self.pool.free:  # a page to spare for each running one, or it would soon be preempted
            return False
        request.pages = self.pool.take(needed)
        request.state = "running"
        self.running.append(self.waiting.popleft())
        return True

    def _make_room(self, request: Request) -> bool:
        """Pages for all tokens of a running request, taken from the youngest if need be; False if that was itself."""
        missing = self.pool.pages_for(request.num_tokens) - len(request.pages)
        while missing > self.pool.free:
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += self.pool.take(missing)
        return True

    def _preempt(self, request: Request) -> None:
        self.pool.give_back(request.pages)
        request.computed = 0
        request.state = "waiting"
        request.preemptions += 1
        self.waiting.appendleft(request)
