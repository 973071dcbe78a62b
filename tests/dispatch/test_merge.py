"""Merging states over disjoint keys, against one softmax in float64."""

from __future__ import annotations

import pytest
import torch

from attnmux.dispatch.merge import merge_states


def state(scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of ``scores [tokens, Hq, keys]`` over ``values [keys, Hq, Dv]`` in float64."""
    logits = scores.double()
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[None, :, None].expand(logits.shape[0], -1, 1)), -1)
    lse = logits.logsumexp(-1)
    weights = torch.exp(scores.double() - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return torch.einsum("thk,khd->thd", weights, values.double()), lse


@pytest.fixture
def parts() -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
    torch.manual_seed(0)
    scores = torch.randn(4, 2, 20) * 6
    scores[1, :, 5:12] = -torch.inf  # the second state of one token is empty
    scores[2] = -torch.inf  # a token that sees nothing
    return scores, torch.randn(20, 2, 5), [slice(0, 5), slice(5, 12), slice(12, 20)]


def states(parts) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    scores, values, cuts = parts
    outs, lses = zip(*(state(scores[..., cut], values[cut]) for cut in cuts), strict=True)
    return [out.float() for out in outs], [lse.float() for lse in lses]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_equals_one_softmax(parts, with_sinks, stacked):
    sinks = torch.tensor([0.7, -2.0]) if with_sinks else None
    outs, lses = states(parts)
    out, lse = merge_states(torch.stack(outs), torch.stack(lses), sinks) if stacked else merge_states(outs, lses, sinks)
    want_out, want_lse = state(*parts[:2], sinks)
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
    assert lse.dtype == torch.float32


def test_the_sink_counts_once(parts):
    sinks = torch.tensor([3.0, 1.0])
    outs, lses = states(parts)
    once = merge_states(outs, lses, sinks)
    in_each = merge_states(*zip(*(tuple(t.float() for t in state(parts[0][..., cut], parts[1][cut], sinks)) for cut in parts[2]), strict=True))
    assert (once[1] - in_each[1]).abs().max() > 0.1  # the control: a sink in every state is another answer


def test_empty_states_hold_anything(parts):
    outs, lses = states(parts)
    want = merge_states(outs, lses)
    for out, lse in zip(outs, lses, strict=True):
        out[lse == -torch.inf] = torch.nan
    got = merge_states(outs, lses)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    outs[0][0] = torch.nan  # the control: of a state that is not empty
    assert torch.isnan(merge_states(outs, lses)[0][0]).all()


def test_nothing_stays_nothing():
    outs, lses = torch.full((3, 2, 2, 4), torch.nan), torch.full((3, 2, 2), -torch.inf)
    out, lse = merge_states(outs, lses)
    assert torch.equal(out, torch.zeros(2, 2, 4)) and torch.equal(lse, torch.full((2, 2), -torch.inf))
    sinks = torch.tensor([0.5, -torch.inf])
    out, lse = merge_states(outs, lses, sinks)
    assert torch.equal(out, torch.zeros(2, 2, 4)) and torch.equal(lse, sinks.expand(2, 2))


def test_large_logits_do_not_overflow():
    outs = torch.stack((torch.zeros(1, 1, 2), torch.ones(1, 1, 2)))
    out, lse = merge_states(outs, torch.tensor([[[9000.0]], [[9000.0]]]))
    torch.testing.assert_close(out, torch.full((1, 1, 2), 0.5))
    torch.testing.assert_close(lse, torch.tensor([[9000.6931]]))


@pytest.mark.parametrize(
    ("outs", "lses", "sinks", "error", "match"),
    [
        (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4).double(), None, TypeError, "lses is torch.float64, wanted torch.float32"),
        (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 5), None, ValueError, "lses"),
        (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4), torch.zeros(3), ValueError, "sinks"),
        ([], [], None, TypeError, "outs is list, wanted"),
        ("ab", torch.zeros(2, 3, 4), None, TypeError, "outs is str, wanted"),
    ],
)
def test_what_does_not_fit_raises(outs, lses, sinks, error, match):
    with pytest.raises(error, match=match):
        merge_states(outs, lses, sinks)
