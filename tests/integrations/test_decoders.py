"""Decoders under ``attn_implementation="attnmux"`` against eager: same tokens, logits as close to float64 as eager's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

NAMES = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "llama4")
LENGTHS = (13, 4, 9)  # one as long as the batch, one shorter and one longer than the window


def left_padded(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 61, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths))[None, :] >= max(lengths) - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def generate(model: Any, implementation: str, inputs: dict[str, Tensor], cache: str | None = None, new: int = 10) -> tuple[Tensor, Tensor]:
    """New tokens ``[batch, new]`` and their logits ``[new, batch, vocabulary]``, greedy."""
    model.set_attn_implementation(implementation)
    out = model.generate(**inputs, do_sample=False, max_new_tokens=new, cache_implementation=cache, output_logits=True, return_dict_in_generate=True)
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits)


def generate_alone(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The same in float64, each row without its padding: transformers' float64 masks overflow to NaN where all keys are padding."""
    exact = copy.deepcopy(model).double()
    rows = [generate(exact, "eager", {"input_ids": ids[mask.bool()][None]}) for ids, mask in zip(*inputs.values(), strict=True)]
    return torch.cat([tokens for tokens, _ in rows]), torch.cat([logits for _, logits in rows], 1)


def assert_as_exact_as_eager(ours: Tensor, eager: Tensor, exact: Tensor) -> None:
    """The house rule: at most twice torch's own error to float64, plus 1e-5."""
    allowed = 2 * (eager.double() - exact).abs().max() + 1e-5
    assert (ours.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", NAMES)
def test_generate_equals_eager(name: str, cache: str | None, tiny_model: Callable[[str], Any], registered: Any) -> None:
    model, inputs = tiny_model(name), left_padded()
    exact_tokens, exact = generate_alone(model, inputs)
    tokens, eager = generate(model, "eager", inputs, cache)
    our_tokens, ours = generate(model, "attnmux", inputs, cache)
    assert torch.equal(tokens, exact_tokens), "eager is not sure of its own tokens: choose another seed"
    assert torch.equal(our_tokens, tokens)
    assert_as_exact_as_eager(ours, eager, exact)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generate_in_bf16_is_as_exact_as_eager(name: str, tiny_model: Callable[[str], Any], registered: Any) -> None:
    model, inputs = copy.deepcopy(tiny_model(name)).bfloat16(), left_padded()

    def logits(m: Any, implementation: str) -> Tensor:
        m.set_attn_implementation(implementation)
        return m(**inputs).logits[:, -1].double()

    _, exact = generate_alone(model, inputs)
    exact = exact[0]
    assert_as_exact_as_eager(logits(model, "attnmux"), logits(model, "eager"), exact)


def test_keys_of_a_dynamic_cache_are_never_copied(tiny_model: Callable[[str], Any], registered: Any) -> None:
    before = registered.copies.keys
    generate(tiny_model("llama"), "attnmux", left_padded())
    assert registered.copies.keys == before


def test_a_plan_serves_all_layers_of_a_forward(tiny_model: Callable[[str], Any], registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnmux.dispatch.attention import Attention

    plans: list[object] = []
    plan = Attention.plan
    monkeypatch.setattr(Attention, "plan", lambda self, batch, into=None: plans.append(batch) or plan(self, batch, into))
    model = tiny_model("llama")
    model.set_attn_implementation("attnmux")
    model(**left_padded(), use_cache=False)
    assert len(plans) == 1 < model.config.num_hidden_layers


def test_padding_rows_are_zero_and_right_padding_works(tiny_model: Callable[[str], Any], registered: Any, tamper: Callable[..., None]) -> None:
    model = tiny_model("mistral")
    inputs = {name: value.flip(1) for name, value in left_padded().items()}
    outputs: list[Tensor] = []

    def keep(attention: Any, *args: Any, **kwargs: Any) -> Any:
        outputs.append(attention(*args, **kwargs)[0])
        return outputs[-1], None

    tamper(attention=keep)
    model.set_attn_implementation("eager")
    eager = model(**inputs).logits
    model.set_attn_implementation("attnmux")
    ours = model(**inputs).logits
    real = inputs["attention_mask"].bool()
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    alone = [exact(ids[mask][None]).logits[0] for ids, mask in zip(inputs["input_ids"], real, strict=True)]
    assert_as_exact_as_eager(ours[real], eager[real], torch.cat(alone))
    assert all((out[~real] == 0).all() for out in outputs)
    assert not any((out[real] == 0).all() for out in outputs)


def test_a_cache_may_be_continued_with_several_tokens(tiny_model: Callable[[str], Any], registered: Any) -> None:
    """A second turn: new tokens over cached ones, past a full sliding window."""
    model, inputs = tiny_model("gemma3"), left_padded((11, 8))
    more = torch.randint(2, 61, (2, 4), generator=torch.Generator().manual_seed(3))

    def second_turn(implementation: str) -> Tensor:
        model.set_attn_implementation(implementation)
        cache = transformers.DynamicCache(config=model.config)
        model(**inputs, cache=cache)
        mask = torch.cat((inputs["attention_mask"], torch.ones_like(more)), 1)
        return model(input_ids=more, attention_mask=mask, cache=cache).logits

    torch.testing.assert_close(second_turn("attnmux"), second_turn("eager"), rtol=1e-4, atol=1e-4)


def test_the_model_around_it_compiles(tiny_model: Callable[[str], Any], registered: Any) -> None:
    model, inputs = copy.deepcopy(tiny_model("llama")), left_padded()
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    expected, _ = generate(model, "eager", inputs, new=3)
    model.forward = torch.compile(model.forward, backend="eager")
    tokens, _ = generate(model, "attnmux", inputs, "static", new=3)
    assert torch.equal(tokens, expected)


def drop_padding(mask: Any, *args: Any, **kwargs: Any) -> Any:
    return mask(*args, **{**kwargs, "attention_mask": None})


def drop_window(mask: Any, *args: Any, **kwargs: Any) -> Any:
    from transformers.masking_utils import causal_mask_function

    return mask(*args, **{**kwargs, "mask_function": causal_mask_function})


def widen_window(mask: Any, *args: Any, **kwargs: Any) -> Any:
    from transformers.masking_utils import sliding_window_causal_mask_function

    return mask(*args, **{**kwargs, "mask_function": sliding_window_causal_mask_function(kwargs["local_size"] + 1)})


def drop(argument: str) -> Callable[..., Any]:
    return lambda attention, *args, **kwargs: attention(*args, **{**kwargs, argument: None})


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("llama", {"mask": drop_padding}),
        ("mistral", {"mask": drop_window}),
        ("mistral", {"mask": widen_window}),
        ("llama4", {"mask": drop_window}),
        ("gemma2", {"attention": drop("softcap")}),
        ("gemma2", {"attention": drop("scaling")}),
        ("gpt_oss", {"attention": drop("s_aux")}),
    ],
    ids=["padding", "window", "window+1", "chunk", "softcap", "scale", "sinks"],
)
def test_whatever_is_dropped_shows(
    name: str, broken: dict[str, Any], tiny_model: Callable[[str], Any], registered: Any, tamper: Callable[..., None]
) -> None:
    model, inputs = tiny_model(name), left_padded()
    _, eager = generate(model, "eager", inputs)
    tamper(**broken)
    _, ours = generate(model, "attnmux", inputs)
    assert (ours - eager)[0].abs().max() > 1e-3
