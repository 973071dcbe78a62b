"""Pages and the scheduler, without a model: budgets, waiting, preemption, and no page lost or shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.dispatch.demo.pool import PagePool
from attnmux.dispatch.demo.request import Request
from attnmux.dispatch.demo.scheduler import ScheduledRow, Scheduler


def finish_step(scheduler: Scheduler, rows: list[ScheduledRow], token: int = 5) -> None:
    """What the engine does after a forward, with a made-up token."""
    for row in rows:
        samples = row.samples
        row.request.computed += row.q_len
        if samples and row.request.accept(token):
            scheduler.finish(row.request)


def check_invariants(scheduler: Scheduler, requests: list[Request], rows: list[ScheduledRow]) -> None:
    pool = scheduler.pool
    held = [page for request in requests for page in request.pages]
    assert len(set(held)) == len(held) == pool.used, "a page is shared or lost"
    assert pool.used + pool.free == pool.num_pages
    assert sum(row.q_len for row in rows) <= scheduler.token_budget
    assert len(rows) <= scheduler.max_num_seqs
    assert len({row.request for row in rows}) == len(rows)
    for row in rows:
        assert 1 <= row.q_len <= row.request.pending
        assert len(row.request.pages) * pool.page_size >= row.seq_len, "a token without a page"
        assert row.request.state == "running"
    decoding = [r for r in scheduler.running if r.decoding]
    assert set(decoding) <= {row.request for row in rows}, "a decode row was stalled"


def run(scheduler: Scheduler, requests: list[Request], limit: int = 5000) -> list[list[tuple[int, int]]]:
    """Serve until done; returns (request, q_len) of every step."""
    for request in requests:
        scheduler.add(request)
    steps = []
    while rows := scheduler.schedule():
        check_invariants(scheduler, requests, rows)
        steps.append([(row.request.index, row.q_len) for row in rows])
        finish_step(scheduler, rows)
        assert len(steps) < limit, "it does not come to an end"
    return steps


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Scheduler, list[Request]]:
    page_size, budget = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    requests = [Request(i, [7] * draw(st.integers(1, 40)), draw(st.integers(1, 12))) for i in range(draw(st.integers(1, 7)))]
    largest = max(-(-(len(r.prompt) + r.max_new_tokens) // page_size) for r in requests)
    pool = PagePool(largest + draw(st.integers(0, 2 * largest)), page_size)
    return Scheduler(pool, budget, draw(st.integers(1, 8))), requests


@settings(max_examples=200, deadline=None, derandomize=True)
@given(workloads())
def test_every_request_ends_and_every_page_returns(workload: tuple[Scheduler, list[Request]]) -> None:
    scheduler, requests = workload
    run(scheduler, requests)
    assert all(r.state == "finished" and len(r.generated) == r.max_new_tokens and not r.pages for r in requests)
    assert scheduler.pool.used == 0 and not scheduler.running and not scheduler.waiting


def test_a_long_prompt_comes_in_chunks_beside_decode_rows() -> None:
    short, long = Request(0, [7] * 2, 6), Request(1, [7] * 25, 2)
    steps = run(Scheduler(PagePool(20, 4), 10, 4), [short, long])
    assert steps == [[(0, 2), (1, 8)], [(0, 1), (1, 9)], [(0, 1), (1, 8)], [(0, 1), (1, 1)], [(0, 1)], [(0, 1)]]


def test_what_does_not_fit_waits_for_pages() -> None:
    first, second = Request(0, [7] * 8, 3), Request(1, [7] * 8, 3)
    scheduler = Scheduler(PagePool(4, 4), 16, 4)
    steps = run(scheduler, [first, second])
    assert steps == [[(0, 8)], [(0, 1)], [(0, 1)], [(1, 8)], [(1, 1)], [(1, 1)]]
    assert scheduler.pool.peak == 3 and first.preemptions == second.preemptions == 0


def test_the_youngest_is_preempted_and_starts_over() -> None:
    old, young = Request(0, [7] * 4, 9), Request(1, [7] * 4, 9)
    steps = run(Scheduler(PagePool(5, 4), 16, 4), [old, young])
    assert (old.preemptions, young.preemptions) == (0, 1)
    again = next(rows for rows in steps[1:] if any(index == 1 and q_len > 1 for index, q_len in rows))
    assert again == [(1, 4 + 5)], "its prompt and what it had generated, once there is room"


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="request 3 is up to 21 tokens, 6 pages, wanted at most 5 pages"):
        Scheduler(PagePool(5, 4), 16, 4).add(Request(3, [7] * 15, 6))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt of request 0 is empty"):
        Scheduler(PagePool(5, 4), 16, 4).add(Request(0, [], 6))


def test_a_stop_token_ends_a_request_and_is_kept() -> None:
    request = Request(0, [7], 10, frozenset({5}))
    run(Scheduler(PagePool(5, 4), 16, 4), [request])
    assert request.generated == [5]


def test_pages_are_taken_and_given_back_once() -> None:
    pool = PagePool(3, 16)
    assert pool.pages_for(0) == 0 and pool.pages_for(16) == 1 and pool.pages_for(17) == 2
    pages = pool.take(2)
    with pytest.raises(ValueError, match="count is 2, wanted at most the 1 free pages"):
        pool.take(2)
    copy = list(pages)
    pool.give_back(pages)
    assert pages == [] and pool.free == 3 and pool.peak == 2
    for wrong in (copy, [0, 0], [99]):
        with pytest.raises(ValueError, match="distinct pages among the"):
            pool.give_back(wrong)
    assert pool.free == 3


@pytest.mark.parametrize("make", [lambda: PagePool(0, 4), lambda: PagePool(4, 0), lambda: Scheduler(PagePool(4, 4), 0, 1)])
def test_nothing_of_nothing_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match="wanted at least 1"):
        make()  # type: ignore[operator]
