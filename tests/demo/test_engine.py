"""The engine on tiny random models: every token equals transformers' eager greedy output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attnmux.dispatch.demo.check import Verdict, compare, first_difference
from attnmux.dispatch.demo.engine import Engine
from attnmux.dispatch.demo.request import Request

pytestmark = pytest.mark.filterwarnings("ignore:.*generation flags.*")
Make = Callable[..., Any]


def serve(engine: Engine, requests: list[Request]) -> list[list[tuple[int, int]]]:
    """Serve; returns (request, q_len) of every step."""
    steps = []
    for rows in engine.run(requests):
        steps.append([(row.request.index, row.q_len) for row in rows])
        held = [page for request in requests for page in request.pages]
        assert len(set(held)) == len(held) == engine.pool.used
    assert engine.pool.used == 0
    return steps


def verdicts(model: Any, requests: list[Request]) -> list[Verdict]:
    return list(compare(model, requests))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "llama4"])
def test_tokens_equal_eager(name: str, decoder: Make, engine: Make, requests: Make) -> None:
    """A budget below the longest prompt, so that prompts come in chunks beside decode rows."""
    model, served = decoder(name), requests()
    e = engine(model, budget=8)
    steps = serve(e, served)
    assert any({1} < {q_len for _, q_len in step} for step in steps), "no step mixed decode and prefill rows"
    assert e.counters.mixed_steps > 0
    assert all(v.equal for v in verdicts(model, served))
    assert len({tuple(r.generated) for r in served}) == len(served), "all texts are the same: the test would prove little"


def test_layers_with_equal_specs_share_a_plan(decoder: Make, engine: Make, requests: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnmux.dispatch.attention import Attention

    refreshed: list[bool] = []
    plan = Attention.plan
    monkeypatch.setattr(Attention, "plan", lambda self, batch, into=None: refreshed.append(into is not None) or plan(self, batch, into))
    e = engine(decoder("llama"))
    steps = serve(e, requests())
    assert len(e.runner.attentions) == 1 and len(refreshed) == len(steps) == e.counters.steps
    assert any(refreshed), "steps with the same row classes refresh the plan in place"


def test_a_preempted_request_resumes_to_the_same_tokens(decoder: Make, engine: Make, requests: Make) -> None:
    model = decoder("llama")
    crowded, roomy = requests((9, 9, 9), 14), requests((9, 9, 9), 14)
    serve(engine(model, budget=16, pages=13), crowded)
    serve(engine(model, budget=16, pages=64), roomy)
    assert sum(r.preemptions for r in crowded) > 0 and not any(r.preemptions for r in roomy)
    assert [r.generated for r in crowded] == [r.generated for r in roomy]
    assert all(v.equal for v in verdicts(model, crowded))


def test_a_stop_token_ends_a_request_early(decoder: Make, engine: Make, requests: Make) -> None:
    model = decoder("llama")
    plain = requests((9, 4), 12)
    serve(engine(model), plain)
    stop = plain[0].generated[4]
    stopped = [Request(r.index, r.prompt, 12, frozenset({stop})) for r in plain]
    serve(engine(model), stopped)
    assert stopped[0].generated == plain[0].generated[: plain[0].generated.index(stop) + 1]
    assert all(v.equal for v in verdicts(model, stopped))


def test_keys_of_another_request_show(decoder: Make, engine: Make, requests: Make) -> None:
    """The check can fail: two requests change a page half way."""
    model, served = decoder("llama"), requests((21, 9, 6))
    one, other, third = served
    e = engine(model, budget=16)
    for _ in e.run(served):
        if len(other.generated) == 2:
            one.pages[0], other.pages[0] = other.pages[0], one.pages[0]
    assert [v.equal for v in verdicts(model, served)] == [False, False, True]
    assert third.state == "finished"


def test_counters_add_up(decoder: Make, engine: Make, requests: Make) -> None:
    served = requests((3, 21, 9), 5)
    e = engine(decoder("llama"), budget=8)
    steps = serve(e, served)
    c = e.counters
    assert c.steps == len(steps)
    assert c.prompt_tokens == 3 + 21 + 9
    assert c.decode_tokens == sum(len(r.generated) - 1 for r in served)
    assert c.prompt_tokens + c.decode_tokens == sum(q_len for step in steps for _, q_len in step)


def test_a_backend_may_be_required(decoder: Make, engine: Make, requests: Make) -> None:
    model, served = decoder("llama"), requests((5, 9), 4)
    e = engine(model, require="reference")
    assert {s.name for s in e.runner.selections} == {"reference"}
    serve(e, served)
    assert all(v.equal for v in verdicts(model, served))


@pytest.mark.parametrize(
    ("left", "right", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([4, 5, 6], [4], 1)]
)
def test_first_difference(left: list[int], right: list[int], at: int | None) -> None:
    assert first_difference(left, right) == at
