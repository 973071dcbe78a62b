"""The registered operators: their schemas and fake implementations, and a decoder layer compiled whole around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from fake_plugins import TinyBackend, claim, info, lab, registry
from torch import Tensor, nn

import attnmux
from attnmux.dispatch import host
from attnmux.dispatch.constraints import ANY, YES_OR_NO
from attnmux.dispatch.spec import AttentionSpec

HIDDEN, TOKENS, PAGES = 32, 6, 16


@pytest.fixture(autouse=True)
def tiny_backend() -> Iterator[None]:
    able = claim(return_lse=YES_OR_NO, sinks=YES_OR_NO, kv_dtype=ANY, kv_scale=ANY)
    with host.using(registry(platforms=[lab("tiny")], backends=[info("tiny", able)])):
        TinyBackend.calls.clear()
        yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """A decoder layer: norm, qkv, cache write, attention, output projection, MLP. ``bare`` leaves all but the matrices and the operators out."""

    def __init__(self, attn: attnmux.Attention, bare: bool = False) -> None:
        super().__init__()
        self.attn, self.bare = attn, bare
        spec = attn.spec
        self.sizes = [n * spec.head_size for n in (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)]
        self.norm, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, sum(self.sizes), bias=False)
        self.out = nn.Linear(self.sizes[0], HIDDEN, bias=False)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.SiLU(), nn.Linear(2 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, plan: attnmux.Plan, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        spec = self.attn.spec
        q, k, v = (t.view(t.shape[0], -1, spec.head_size) for t in self.qkv(x if self.bare else self.norm(x)).split(self.sizes, -1))
        self.attn.write_kv(k, v, k_cache, v_cache, slots)
        attended = self.attn.run(q, k_cache, v_cache, plan)
        assert isinstance(attended, Tensor)
        if self.bare:
            return self.out(attended.flatten(1))
        x = x + self.out(attended.flatten(1))
        return x + self.mlp(self.norm2(x))


class Serving:
    """Two rows that grow by three tokens a step; every step has as many tokens, as a captured or compiled model wants."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.attn = attnmux.Attention(spec, "cpu")
        torch.manual_seed(0)
        self.layer = Layer(self.attn).requires_grad_(False)
        self.table = torch.arange(PAGES, dtype=torch.int32).view(2, -1)

    def caches(self) -> tuple[Tensor, Tensor]:
        shape = (PAGES, self.spec.page_size or 1, self.spec.num_kv_heads, self.spec.head_size)
        return torch.zeros(shape), torch.zeros(shape)

    def batch(self, step: int) -> tuple[attnmux.Batch, Tensor]:
        lengths = torch.tensor([3 * (step + 1)] * 2, dtype=torch.int32)
        positions = torch.arange(3 * step, 3 * (step + 1))
        assert self.spec.page_size
        slots = self.table[:, positions // self.spec.page_size].long() * self.spec.page_size + positions % self.spec.page_size
        return attnmux.Batch(torch.tensor([0, 3, 6], dtype=torch.int32), lengths, self.table), slots.flatten()

    def generate(self, layer: Callable[..., Tensor], steps: int, refresh: bool) -> tuple[list[Tensor], tuple[Tensor, Tensor], bool]:
        """Outputs of every step, the caches, and whether the backend was given the caller's own."""
        k_cache, v_cache = self.caches()
        plan, outs = None, []
        generator = torch.Generator().manual_seed(1)
        TinyBackend.calls.clear()
        for step in range(steps):
            batch, slots = self.batch(step)
            plan = self.attn.plan(batch, into=plan if refresh else None)
            outs.append(layer(torch.randn(TOKENS, HIDDEN, generator=generator), plan, k_cache, v_cache, slots))
        seen = {what[1] for verb, what in TinyBackend.calls if verb == "run"}
        return outs, (k_cache, v_cache), seen == {k_cache.data_ptr()}


@pytest.mark.parametrize("refresh", [False, True], ids=["a new plan each step", "a refreshed plan"])
def test_a_compiled_layer_equals_eager_and_is_compiled_once(refresh: bool, spec: AttentionSpec) -> None:
    serving = Serving(spec)
    eager, eager_caches, _ = serving.generate(serving.layer, 4, refresh)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(serving.layer, fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        outs, caches, _ = serving.generate(compiled, 4, refresh)
    assert counter.frame_count == 1
    for found, wanted in zip((*outs, *caches), (*eager, *eager_caches), strict=True):
        torch.testing.assert_close(found, wanted)
    assert not torch.equal(eager[0], eager[1])


def test_inductor_gives_the_operator_the_callers_own_cache(spec: AttentionSpec) -> None:
    """``aot_eager`` copies what an operator mutates; the compiler that people use must not, for a cache is most of the memory."""
    serving = Serving(spec)
    layer = Layer(serving.attn, bare=True).requires_grad_(False)  # without pointwise operators, which would cost a minute of C++ compiler
    eager, eager_caches, own = serving.generate(layer, 2, refresh=True)
    assert own
    compiled = torch.compile(layer, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        outs, caches, own = serving.generate(compiled, 2, refresh=True)
    assert own
    for found, wanted in zip((*outs, *caches), (*eager, *eager_caches), strict=True):
        torch.testing.assert_close(found, wanted)


def test_two_layers_share_one_compiled_graph_with_their_own_caches(spec: AttentionSpec) -> None:
    serving = Serving(spec)
    second = Layer(serving.attn).requires_grad_(False)
    k2, v2 = serving.caches()

    def stack(x: Tensor, plan: attnmux.Plan, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        return second(serving.layer(x, plan, k_cache, v_cache, slots), plan, k2, v2, slots)

    batch, slots = serving.batch(0)
    plan, (k1, v1), x = serving.attn.plan(batch), serving.caches(), torch.randn(TOKENS, HIDDEN)
    eager = stack(x, plan, k1, v1, slots)
    written = k2.clone()
    for cache in (k1, v1, k2, v2):
        cache.zero_()
    torch.testing.assert_close(torch.compile(stack, fullgraph=True, backend="aot_eager")(x, plan, k1, v1, slots), eager)
    torch.testing.assert_close(k2, written)
    assert not torch.equal(k1, k2)


def test_options_of_run_compile_too(spec: AttentionSpec) -> None:
    spec = spec.replace(return_lse=True)
    serving = Serving(spec)
    batch, _ = serving.batch(0)
    plan, (k, v) = serving.attn.plan(batch), serving.caches()
    q = torch.randn(TOKENS + 2, spec.num_q_heads, spec.head_size)

    def call(q: Tensor, out: Tensor, plan: attnmux.Plan) -> Any:
        return serving.attn.run(q, k, v, plan, out=out, only="decode")

    eager_out, eager_lse = call(q, torch.full_like(q, 7.0), plan)
    out, lse = torch.compile(call, fullgraph=True, backend="aot_eager")(q, torch.full_like(q, 7.0), plan)
    assert torch.equal(out, eager_out)
    assert torch.equal(lse[:TOKENS], eager_lse[:TOKENS])
    assert (out[TOKENS:] == 7).all()


def test_a_wrong_call_raises_the_same_error_when_compiled(spec: AttentionSpec) -> None:
    serving = Serving(spec)
    batch, slots = serving.batch(0)
    plan, (k, v) = serving.attn.plan(batch), serving.caches()
    compiled = torch.compile(serving.layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="slot_mapping is 98, wanted -1"):
        compiled(torch.randn(TOKENS, HIDDEN), plan, k, v, slots + PAGES * 4)
    assert not k.any()


OPERATORS = ("attention", "write_kv")
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("fp8", [False, True])
def test_opcheck(name: str, check: str, fp8: bool, spec: AttentionSpec) -> None:
    if fp8 and check == "test_schema":
        pytest.skip("opcheck itself multiplies every argument by NaN, which torch cannot do in fp8 on a CPU")
    if fp8:
        spec = spec.replace(kv_dtype=torch.float8_e4m3fn, kv_scale="tensor")
    serving = Serving(spec)
    batch, slots = serving.batch(1)
    k, v = (cache.to(spec.kv_dtype) for cache in serving.caches())
    plan = serving.attn.plan(batch)
    scales = (torch.tensor(0.5), None, None, 2.0) if fp8 else (None,) * 4
    if name == "attention":
        q = torch.randn(TOKENS, spec.num_q_heads, spec.head_size)
        k_scale, v_scale, k_value, v_value = scales
        args = (q, k, v, torch.zeros_like(q), None, plan.handle, None, None, None, None, k_scale, v_scale, None, k_value, v_value)
    else:
        new = torch.randn(TOKENS, spec.num_kv_heads, spec.head_size)
        args = (new, new.clone(), k, v, slots, serving.attn.handle, *scales)
    torch.library.opcheck(getattr(torch.ops.attnmux, name).default, args, test_utils=check)


def test_the_operators_say_what_they_write() -> None:
    written = {
        name: [a.name for a in getattr(torch.ops.attnmux, name).default._schema.arguments if a.alias_info and a.alias_info.is_write]
        for name in OPERATORS
    }
    assert written == {"attention": ["k_cache", "v_cache", "out", "lse"], "write_kv": ["k_cache", "v_cache"]}
