"""What no spec expresses is refused, with its name and what to do; nothing is ignored."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor


@pytest.fixture
def llama(tiny_model: Callable[[str], Any], registered: Any) -> Any:
    model = tiny_model("llama")
    model.set_attn_implementation("attnmux")
    yield model
    model.eval()


IDS = torch.arange(2, 10)[None]


def test_packed_sequences(llama: Any) -> None:
    with pytest.raises(ValueError, match=r"packed into one row \(position_ids restart\).*attnmux_plan"):
        llama(input_ids=IDS, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), use_cache=False)


def test_packed_sequences_by_lengths(llama: Any) -> None:
    lengths = torch.tensor([0, 3, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        llama(input_ids=IDS, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=5, max_length_k=5)


def test_padding_in_the_middle(llama: Any) -> None:
    with pytest.raises(ValueError, match=r"row 0 has padding between its tokens; pad on the left"):
        llama(input_ids=IDS, attention_mask=torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1]]))


def test_right_padding_cannot_be_continued(llama: Any) -> None:
    mask = torch.ones(1, 8, dtype=torch.long)
    mask[0, 5:] = 0
    with pytest.raises(ValueError, match="padding between its tokens"):
        llama.generate(IDS, attention_mask=mask, max_new_tokens=3, do_sample=False)


def test_a_mask_that_forgets_the_cache(llama: Any) -> None:
    cache = transformers.DynamicCache(config=llama.config)
    llama(input_ids=IDS, cache=cache)
    with pytest.raises(ValueError, match="attention_mask is 8 tokens long, wanted all 9 tokens"):
        llama(input_ids=IDS[:, :1], attention_mask=torch.ones(1, 8, dtype=torch.long), cache=cache)


def test_a_ready_mask(llama: Any) -> None:
    with pytest.raises(ValueError, match=r"a ready mask of shape \[1, 1, 8, 8\]; pass attention_mask as \[batch, tokens\]"):
        llama(input_ids=IDS, attention_mask=torch.zeros(1, 1, 8, 8))


def test_a_mask_that_someone_computed_with(llama: Any, tamper: Callable[..., None]) -> None:
    tamper(mask=lambda mask, *args, **kwargs: mask(*args, **kwargs) & True)
    with pytest.raises(ValueError, match="a ready mask"):
        llama(input_ids=IDS)


def test_output_attentions(llama: Any) -> None:
    with pytest.raises(ValueError, match="output_attentions"):
        llama(input_ids=IDS, output_attentions=True)


def test_dropout(llama: Any) -> None:
    llama.train()
    for layer in llama.model.layers:
        layer.self_attn.attention_dropout = 0.1
    try:
        with pytest.raises(ValueError, match=r"dropout=0.1; call model.eval\(\)"):
            llama(input_ids=IDS)
    finally:
        for layer in llama.model.layers:
            layer.self_attn.attention_dropout = 0.0


def test_gradients(llama: Any) -> None:
    with torch.enable_grad(), pytest.raises(ValueError, match="requires a gradient"):
        llama(input_ids=IDS)


def test_a_position_bias(registered: Any) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 4}
    model = transformers.T5EncoderModel(transformers.T5Config(vocab_size=61, **sizes)).eval()
    model.set_attn_implementation("attnmux")
    with pytest.raises(ValueError, match="a position bias is added"):
        model(input_ids=IDS)


def compose(llama: Any, **functions: Any) -> Tensor:
    """A mask as models with masks of their own compose it."""
    from transformers.masking_utils import create_causal_mask

    mask = create_causal_mask(config=llama.config, inputs_embeds=torch.zeros(1, 8, 32), attention_mask=None, cache=None, **functions)
    return llama(input_ids=IDS, attention_mask=mask)


def test_multimodal_blocks(llama: Any) -> None:
    blocks = torch.tensor([[-1, -1, 0, 0, 0, -1, -1, -1]])
    with pytest.raises(ValueError, match="the mask holds or_masks of causal_mask_function and blockwise_overlay"):
        compose(llama, block_sequence_ids=blocks)


def test_a_users_own_function_is_named(llama: Any) -> None:
    def every_other_key(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k % 2 == 0

    with pytest.raises(ValueError, match=r"the mask holds .*every_other_key"):
        compose(llama, and_mask_function=every_other_key)


def test_known_parts_in_other_compositions(llama: Any) -> None:
    """An and-mask made of known parts is no reason to refuse."""
    from transformers.masking_utils import sliding_window_overlay

    windowed = compose(llama, and_mask_function=sliding_window_overlay(3)).logits
    llama.set_attn_implementation("eager")
    torch.testing.assert_close(windowed, compose(llama, and_mask_function=sliding_window_overlay(3)).logits, rtol=1e-4, atol=1e-4)


def test_no_transformers_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnmux.dispatch.integrations.transformers import register_transformers

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'attnmux\[transformers\]'"):
        register_transformers.__wrapped__()


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnmux.dispatch.integrations.transformers import register_transformers

    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.10.0")  # loading a model may have replaced the module
    with pytest.raises(ImportError, match=r"transformers is 5.10.0, wanted at least 5.24"):
        register_transformers.__wrapped__()


def test_registering_twice_changes_nothing(registered: Any) -> None:
    import attnmux

    assert attnmux.register_transformers() is registered
