"""Whether served tokens are those of transformers' own eager attention, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.dispatch.demo.request import Request


@dataclass(frozen=True, slots=True)
class Verdict:
    """One request against ``model.generate``.

    Args:
        index: of the request.
        expected: the eager model's tokens.
        first_difference: position of the first token that differs, or ``None``.
    """

    index: int
    expected: tuple[int, ...]
    first_difference: int | None

    @property
    def equal(self) -> bool:
        return self.first_difference is None


def compare(model: Any, requests: Sequence[Request]) -> Iterator[Verdict]:
    """Generate each prompt alone, greedily, with ``attn_implementation="eager"``, on the same weights."""
    model.set_attn_implementation("eager")
    for request in requests:
        expected = eager_tokens(model, request)
        yield Verdict(request.index, tuple(expected), first_difference(request.generated, expected))


@torch.inference_mode()
def eager_tokens(model: Any, request: Request) -> list[int]:
    """The new tokens of ``model.generate(do_sample=False)``, the one that ends the text included."""
    ids = torch.tensor([request.prompt], device=model.device)
    stop = sorted(request.stop_tokens)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=stop or None,
        pad_token_id=stop[0] if stop else 0,
    )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first difference; the shorter one's length if it is a prefix of the other."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))
