"""What engines do over and over with the same objects: batches filled anew, threads that share an Attention, gradients left on."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from attnmux import Attention, AttentionSpec, Batch, Limits, merge_states, reference_attention

SPEC = AttentionSpec(2, 2, 8, torch.float32)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_batch_filled_anew_is_read_anew() -> None:
    attn, k, q = Attention(SPEC, "cpu"), torch.randn(1, 16, 2, 8), torch.randn(1, 2, 8)
    batch = Batch(ints(0, 1), ints(6), block_table=ints(0)[None])
    before = attn.run(q, k, k, attn.plan(batch))
    batch.seq_lens.fill_(4)
    after = attn.run(q, k, k, attn.plan(batch))
    fresh = attn.run(q, k, k, attn.plan(Batch(ints(0, 1), ints(4), block_table=ints(0)[None])))
    assert torch.equal(after, fresh)
    assert not torch.equal(after, before)


def test_the_oracle_reads_a_batch_anew_too() -> None:
    k, q = torch.randn(1, 16, 2, 8), torch.randn(1, 2, 8)
    batch = Batch(ints(0, 1), ints(6), block_table=ints(0)[None])
    before = reference_attention(q, k, k, SPEC, batch)[0]
    batch.seq_lens.fill_(4)
    after = reference_attention(q, k, k, SPEC, batch)[0]
    assert torch.equal(after, reference_attention(q, k, k, SPEC, Batch(ints(0, 1), ints(4), block_table=ints(0)[None]))[0])
    assert not torch.equal(after, before)


@pytest.mark.parametrize("q_len", [1, 17, 40])
def test_a_negative_scale(q_len: int) -> None:
    spec = SPEC.replace(scale=-0.3, page_size=64, return_lse=True)
    k, v, q = torch.randn(1, 64, 2, 8), torch.randn(1, 64, 2, 8), torch.randn(q_len, 2, 8)
    batch = Batch(ints(0, q_len), ints(40), block_table=ints(0)[None])
    attn = Attention(spec, "cpu", require="sdpa")
    out, lse = attn.run(q, k, v, attn.plan(batch))
    want, want_lse = reference_attention(q, k, v, spec, batch, compute_dtype=torch.float64)
    assert torch.allclose(out.double(), want, atol=1e-5)
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)
    assert not torch.allclose(out.double(), reference_attention(q, k, v, spec.replace(scale=0.3), batch, compute_dtype=torch.float64)[0], atol=1e-3)


def test_threads_that_share_an_attention_take_turns() -> None:
    spec = AttentionSpec(8, 8, 64, torch.float32)
    attn, pool = Attention(spec, "cpu", require="sdpa"), torch.randn(80, 16, 8, 64)
    table = torch.randperm(80).view(4, 20).int()
    plans = [attn.plan(Batch(ints(0, 1, 2), ints(250, 260), block_table=table[2 * i : 2 * i + 2].contiguous())) for i in range(2)]
    queries = [torch.randn(2, 8, 64) for _ in plans]
    alone = [attn.run(q, pool, pool, plan) for q, plan in zip(queries, plans, strict=True)]
    wrong: list[int] = []

    def serve(i: int) -> None:
        wrong.extend(i for _ in range(40) if not torch.allclose(attn.run(queries[i], pool, pool, plans[i]), alone[i], atol=1e-5))

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_empty_row_may_have_any_upper_bound() -> None:
    batch = Batch(ints(0, 5), ints(0), block_table=ints(0)[None], seq_lens_cpu=[3], lengths="upper_bound")
    attn = Attention(SPEC, "cpu")
    assert torch.equal(attn.run(torch.randn(5, 2, 8), torch.randn(1, 16, 2, 8), torch.randn(1, 16, 2, 8), attn.plan(batch)), torch.zeros(5, 2, 8))


def test_gradients_do_not_leak_into_the_cache() -> None:
    attn, cache = Attention(SPEC, "cpu"), torch.zeros(1, 16, 2, 8)
    new = torch.randn(1, 2, 8, requires_grad=True)
    with pytest.raises(ValueError, match="k requires a gradient"):
        attn.write_kv(new, new, cache, cache.clone(), torch.tensor([0]))
    assert not cache.requires_grad
    with torch.no_grad():
        attn.write_kv(new, new, cache, cache.clone(), torch.tensor([0]))
    assert torch.equal(cache[0, 0], new[0])


def test_limits_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match="limits is dict, wanted"):
        Attention(SPEC, "cpu", limits={"max_num_seqs": 1})  # type: ignore[arg-type]
    assert Attention(SPEC, "cpu", limits=Limits(1, 1, 16, 1)).workspace_bytes() >= 0


def test_merge_states_says_what_is_wrong() -> None:
    outs, lses = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4)
    with pytest.raises(TypeError, match="sinks is list"):
        merge_states(outs, lses, [0.0] * 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tensors of one shape"):
        merge_states([outs[0], outs[0, :2]], lses)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 states"):
        merge_states(outs[:0], lses[:0])
    with pytest.raises(ValueError, match="float dtype"):
        merge_states(outs.int(), lses)


class Overloaded(torch.Tensor):
    """A tensor that somebody may have changed the meaning of."""


def step(*q_lens: int) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Queries, a pool for keys and values, and rows of 20 keys."""
    pool = torch.randn(2 * len(q_lens), 16, 2, 8)
    starts = ints(0, *torch.tensor(q_lens).cumsum(0).tolist())
    return torch.randn(sum(q_lens), 2, 8), pool, Batch(starts, ints(*[20] * len(q_lens)), torch.arange(2 * len(q_lens)).int().view(-1, 2))


def test_a_row_of_padding_joins_only_a_class_that_was_planned() -> None:
    attn = Attention(SPEC, "cpu")
    _, _, batch = step(1, 0)
    plan = attn.plan(batch)
    attn.plan(step(1, 2)[2], into=plan)
    with pytest.raises(ValueError, match="into is a plan of 2 decode, wanted 1 prefill, 1 decode"):
        attn.plan(step(1, 18)[2], into=plan)
    with pytest.raises(ValueError, match="into is a plan of 1 decode, 1 empty, wanted 1 prefill, 1 decode"):
        attn.plan(step(1, 18)[2], into=attn.plan(batch))


def test_a_plan_whose_refresh_failed_runs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = Attention(SPEC, "cpu", limits=Limits(4, 64, 64, 32))
    q, pool, batch = step(1, 2)
    plan = attn.plan(batch)
    want = attn.run(q, pool, pool, plan)
    backend = attn.backend(plan.routes["decode"][0])

    def fails(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(backend, "plan", fails)
        with pytest.raises(MemoryError):
            attn.plan(step(2, 1)[2], into=plan)
    with pytest.raises(RuntimeError, match="half made: its last refresh failed"):
        attn.run(q, pool, pool, plan)
    assert torch.equal(attn.run(q, pool, pool, attn.plan(batch, into=plan)), want)


def test_what_was_checked_once_is_checked_again_in_another_form() -> None:
    attn = Attention(SPEC.replace(sinks=True), "cpu")
    attn.synchronise = False  # as on a GPU: a form that passed is not checked again in the step
    q, pool, batch = step(1, 2)
    plan, out, sinks = attn.plan(batch), torch.empty(3, 2, 8), torch.zeros(2)
    want = attn.run(q, pool, pool, plan, out=out, sinks=sinks).clone()
    assert len(plan._checked) == 1
    assert torch.equal(attn.run(q, pool, pool, plan, out=out, sinks=sinks), want)
    wrong = [
        {"q": q[:2]},
        {"q": q.double()},
        {"k_cache": pool[:, :8]},
        {"out": out[:, :1]},
        {"out": torch.empty(3, 2, 16)[..., ::2]},
        {"sinks": None},
        {"sinks": torch.zeros(3)},
        {"k_scale": 1.0},
        {"q": torch.nn.Parameter(q)},
    ]
    for change in wrong:
        out.fill_(7)
        with pytest.raises((ValueError, TypeError)):
            attn.run(**{"q": q, "k_cache": pool, "v_cache": pool, "plan": plan, "out": out, "sinks": sinks, **change})
        assert bool((out == 7).all()), change
    attn.plan(step(2, 2)[2], into=plan)
    with pytest.raises(ValueError, match="at least the plan's 4"):  # another step: what passed before says nothing
        attn.run(q, pool, pool, plan, out=out, sinks=sinks)


def test_calls_alike_in_all_but_addresses_have_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = Attention(SPEC, "cpu", limits=Limits(4, 64, 64, 32))
    attn.synchronise = False
    q, pool, batch = step(1, 2)
    plan, out = attn.plan(batch), torch.empty(3, 2, 8)
    backend, forms = attn.backend(plan.routes["decode"][0]), []
    inner = backend.run
    monkeypatch.setattr(backend, "run", lambda *args: (forms.append(args[-1].form), inner(*args)))
    for _ in range(2):
        attn.run(q.clone(), pool, pool.clone(), plan, out=out.clone())
    attn.run(q, pool, pool, plan, out=torch.empty(3, 4, 8)[:, ::2])
    attn.plan(batch, into=plan)
    attn.run(q, pool, pool, plan, out=out)
    assert forms[0] is forms[1] and len({None, *map(id, forms)}) == 4  # another stride, another step


def test_parameters_are_plain_tensors_and_what_cannot_recur_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = Attention(SPEC.replace(sinks=True), "cpu")
    attn.synchronise = False
    q, pool, batch = step(1, 2)
    plan, out = attn.plan(batch), torch.empty(3, 2, 8)
    sinks = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    monkeypatch.setattr("attnmux.dispatch.plan.check_run", check := Mock())
    for _ in range(3):
        attn.run(q, pool, pool, plan, out=out, sinks=sinks)
    assert check.call_count == 1 and len(plan._checked) == 1
    (form,) = plan._checked.values()
    with torch.profiler.profile():  # past what is remembered, but alike
        attn.run(q, pool, pool, plan, out=out, sinks=sinks)
    assert plan._checked == {next(iter(plan._checked)): form}
    for _ in range(3):
        attn.run(q.as_subclass(Overloaded), pool, pool, plan, out=out, sinks=sinks)
        attn.write_kv(torch.ones(1, 2, 8).as_subclass(Overloaded), torch.ones(1, 2, 8), pool, pool.clone(), torch.tensor([3]))
    assert len(plan._checked) == 1 and not attn._written


def test_a_write_that_was_checked_once_is_checked_again_in_another_form() -> None:
    attn = Attention(SPEC, "cpu")
    attn.synchronise = False  # as on a GPU
    pool, new = torch.zeros(2, 16, 2, 8), torch.ones(3, 2, 8)
    good = {"k": new, "v": new, "k_cache": pool, "v_cache": pool.clone(), "slot_mapping": torch.tensor([3, -1, 17])}
    for _ in range(2):
        good["k_cache"].zero_()
        attn.write_kv(**good)
        assert int(pool.sum()) == 32
    assert len(attn._written) == 1
    wrong = [
        {"k": new.double()},
        {"v": new[:, :1]},
        {"k_cache": pool[:, :8]},
        {"slot_mapping": torch.tensor([1, 2, 3, 4])},
        {"slot_mapping": torch.tensor([1, 2, 3], dtype=torch.int32)},
        {"k_scale": 1.0},
        {"k": torch.nn.Parameter(new)},
    ]
    pool.fill_(7)
    for change in wrong:
        with pytest.raises((ValueError, TypeError)):
            attn.write_kv(**{**good, **change})
        assert bool((pool == 7).all()), change


def test_forms_of_writes_are_forgotten_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmux.dispatch.attention.WRITTEN_FORMS", 3)
    attn, pool = Attention(SPEC, "cpu"), torch.zeros(2, 16, 2, 8)
    attn.synchronise = False
    for tokens in range(1, 8):
        attn.write_kv(torch.ones(tokens, 2, 8), torch.ones(tokens, 2, 8), pool, pool.clone(), torch.arange(tokens))
        assert 1 <= len(attn._written) <= 3
    assert int(pool.sum()) == 7 * 16


@pytest.mark.parametrize("name", ["query_lens_cpu", "seq_lens_cpu"])
def test_host_lengths_can_be_read_twice(name: str) -> None:
    batch = step(1, 2)[2]
    setattr(batch, name, iter([1, 2]))
    with pytest.raises(TypeError, match=f"{name} is list_iterator, wanted a sequence of ints"):
        Attention(SPEC, "cpu").plan(batch)


def test_a_graph_made_before_dispatch_holds_the_operators() -> None:
    attn = Attention(SPEC, "cpu")
    attn.synchronise = False
    q, pool, batch = step(1, 2)
    plan, new = attn.plan(batch), torch.ones(3, 2, 8)

    def layer(q: torch.Tensor) -> torch.Tensor:
        attn.write_kv(new, new, pool, pool, torch.tensor([1, 2, 3]))
        return attn.run(q, pool, pool, plan, out=torch.empty_like(q))

    layer(q)
    graph = make_fx(layer, pre_dispatch=True)(q)
    assert {"attnmux.attention.default", "attnmux.write_kv.default"} <= {str(node.target) for node in graph.graph.nodes}


def test_who_traces_profiles_or_negates_meets_the_operator() -> None:
    attn = Attention(SPEC, "cpu")
    q, pool, batch = step(1, 2)
    plan = attn.plan(batch)
    want = attn.run(q, pool, pool, plan)
    with torch.profiler.profile() as profile:
        assert torch.equal(attn.run(q, pool, pool, plan), want)
    assert any(event.key == "attnmux::attention" for event in profile.key_averages())
    assert torch.equal(attn.run(torch._neg_view(-q), pool, pool, plan), want)
    traced = torch.jit.trace(lambda query: attn.run(query, pool, pool, plan), (q,), check_trace=False)
    assert torch.equal(traced(2 * q), attn.run(2 * q, pool, pool, plan))


@pytest.mark.parametrize("which", ["k", "v"])
def test_new_keys_lie_side_by_side(which: str) -> None:
    attn, pool = Attention(SPEC, "cpu"), torch.zeros(1, 16, 2, 8)
    new = {"k": torch.randn(1, 2, 8), "v": torch.randn(1, 2, 8), which: torch.randn(1, 2, 16)[..., ::2]}
    with pytest.raises(ValueError, match=f"{which}'s last dimension is strided by 2, wanted contiguous"):
        attn.write_kv(new["k"], new["v"], pool, pool.clone(), torch.tensor([0]))
    assert not pool.any()
