"""Ranges of keys against the dense mask they summarise, over random rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.kernels.masks import Sight


@st.composite
def sights(draw):
    kind = draw(st.sampled_from(["plain", "cross", "rswa"]))
    if kind == "cross":
        return Sight(positions=False)
    if kind == "rswa":
        return Sight(rswa_window=draw(st.integers(1, 9)))
    window = draw(st.none() | st.integers(1, 12))
    return Sight(
        window=window,
        window_right=None if window is None else draw(st.none() | st.integers(0, 6)),
        chunk=draw(st.none() | st.tuples(st.integers(1, 7), st.integers(0, 2))),
        mm_prefix=draw(st.sampled_from([None, "override_window", "within_window"])),
    )


@st.composite
def disjoint_spans(draw, most):
    cuts = sorted(draw(st.sets(st.integers(0, most), max_size=8)))
    return [(a, b, draw(st.none() | st.integers(0, 1))) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]


@st.composite
def rows(draw):
    kv_len = draw(st.integers(1, 30))
    q_len = draw(st.integers(1, kv_len))
    first = draw(st.integers(kv_len - q_len, kv_len - 1))
    return kv_len, first, draw(st.integers(first + 1, kv_len)), draw(disjoint_spans(kv_len)), draw(st.integers(0, 35)), draw(st.booleans())


@settings(max_examples=400, deadline=None, derandomize=True)
@given(sights(), rows())
def test_ranges_are_what_the_mask_says(sight, row):
    kv_len, first, end, spans, prefix_len, causal = row
    q_pos, k_pos = torch.arange(first, end)[:, None], torch.arange(-2, kv_len + 3)[None]
    mask = sight.mask(q_pos, k_pos, causal, kv_len, spans, prefix_len)
    some = {key for lo, hi in sight.seen_by_some(first, end, causal, kv_len, spans, prefix_len) for key in range(lo, hi)}
    assert some == set(k_pos[0, mask.any(0)].tolist())
    every = {key for lo, hi in sight.seen_by_all(first, end, causal, kv_len, prefix_len) for key in range(lo, hi)}
    alone = sight.mask(q_pos, k_pos, causal, kv_len, (), prefix_len)
    assert every == set(k_pos[0, alone.all(0)].tolist())


@settings(max_examples=50, deadline=None, derandomize=True)
@given(sights(), st.lists(rows(), min_size=2, max_size=3))
def test_rows_of_several_lengths_mask_as_one_tensor(sight, several):
    q_pos, k_pos = torch.stack([torch.arange(3) + r[1] for r in several])[:, :, None], torch.arange(34).expand(len(several), 1, -1)
    causal, lens, prefixes = torch.tensor([r[5] for r in several]), torch.tensor([r[0] for r in several]), torch.tensor([r[4] for r in several])
    together = sight.mask(q_pos, k_pos, causal[:, None, None], lens[:, None, None], (), prefixes[:, None, None])
    for i, (kv_len, _, _, _, prefix_len, is_causal) in enumerate(several):
        assert torch.equal(together[i], sight.mask(q_pos[i], k_pos[i], is_causal, kv_len, (), prefix_len))


def test_ranges_that_touch_are_one_and_gaps_stay():
    gap = Sight(rswa_window=3).seen_by_some(20, 22, True, 22, prefix_len=5)
    assert gap == [(0, 5), (18, 22)]
    assert Sight(rswa_window=3).seen_by_some(20, 22, True, 22, prefix_len=18) == [(0, 22)]
    group = Sight(window=2, mm_prefix="override_window")
    assert group.seen_by_some(20, 21, True, 30, [(3, 5, 0), (20, 23, 0), (27, 29, 1)]) == [(3, 5), (19, 23)]
