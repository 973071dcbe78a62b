"""Merging partial results, and finding keys in caches of any strides."""

from __future__ import annotations

import torch

from attnmux.kernels.sdpa.keys import locate
from attnmux.kernels.sdpa.run import merge
from attnmux.kernels.sdpa.step import KeyRun, KeySlices, Work
from attnmux.kernels.sdpa.tiles import Shape


def attend(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lse = scores.double().logsumexp(-1)
    weights = torch.exp(scores.double() - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return torch.einsum("nhk,hkd->nhd", weights, values.double()).float(), lse.float()


def test_any_number_of_results_a_token():
    torch.manual_seed(0)
    scores, values = torch.randn(3, 2, 12) * 4, torch.randn(2, 12, 5)
    scores[1] = -torch.inf  # a token that sees nothing at all
    scores[2, :, :4] = -torch.inf  # and one for which a single state is empty
    want_out, want_lse = attend(scores, values)
    pieces = [(0, 0, 12), (1, 0, 6), (2, 0, 4), (2, 4, 7), (2, 7, 12), (1, 6, 12)]
    outs, lses = zip(*(attend(scores[t : t + 1, :, lo:hi], values[:, lo:hi]) for t, lo, hi in pieces), strict=True)
    index = torch.tensor([t for t, _, _ in pieces])
    empty = torch.zeros(3, 2, 5), torch.full((3, 2), -torch.inf)
    out, lse = merge(*empty, torch.cat(outs), torch.cat(lses), index)
    torch.testing.assert_close(out, want_out, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-6)
    half = merge(*empty, torch.cat(outs[:3]), torch.cat(lses[:3]), index[:3])
    out, lse = merge(*half, torch.cat(outs[3:]), torch.cat(lses[3:]), index[3:])
    torch.testing.assert_close(out, want_out, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-6)


def test_one_result_a_token_in_order():
    torch.manual_seed(1)
    scores, values = torch.randn(4, 2, 9), torch.randn(2, 9, 3)
    first, second = attend(scores[..., :2], values[:, :2]), attend(scores[..., 2:], values[:, 2:])
    out, lse = merge(*first, *second, None)
    want = attend(scores, values)
    torch.testing.assert_close(out, want[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, want[1], rtol=0, atol=1e-6)


def work(pages: list[list[int]]) -> Work:
    page = torch.tensor(pages)
    return Work(torch.zeros(len(pages)), None, len(pages), 1, page.shape[1] * 4, page, torch.zeros_like(page), 0, torch.float32, True, False)


SHAPE = Shape(2, 2, 8, 8, 4, torch.float32, False, False)


def test_neighbouring_pages_are_read_where_they_are():
    cache = torch.zeros(9, 4, 2, 8)
    assert locate(SHAPE, work([[3, 4, 5]]), cache) == KeyRun(3 * 64, 16)
    hnd = torch.zeros(9, 2, 4, 8).transpose(1, 2)
    assert locate(SHAPE, work([[3]]), hnd) == KeyRun(3 * 64, 8)
    for pages in ([[3, 5]], [[4, 3]], [[3], [4]]):
        assert isinstance(locate(SHAPE, work(pages), cache), KeySlices)
    assert isinstance(locate(SHAPE, work([[3, 4]]), hnd), KeySlices)  # the keys of a head do not follow each other


def test_slices_are_as_long_as_the_strides_allow():
    page = 4 * 2 * 8
    cases = {
        "NHD": (torch.zeros(9, 4, 2, 8), page),
        "K and V in one pool": (torch.zeros(9, 2, 4, 2, 8)[:, 1], page),
        "HND": (torch.zeros(9, 2, 4, 8).transpose(1, 2), 4 * 8),
        "heads of a wider pool": (torch.zeros(9, 4, 5, 8)[:, :, :2], 8),
        "part of a wider head": (torch.zeros(9, 4, 2, 20)[..., :8], 8),
    }
    for name, (cache, size) in cases.items():
        source = locate(SHAPE, work([[7, 2], [0, 8]]), cache)
        assert source.size == size, name
        assert source.places.numel() * size == 2 * 2 * page, name


def test_offsets_beyond_32_bits():
    cache = torch.empty(1, dtype=torch.uint8).as_strided((1, 1, 1, 1), (1, 1, 1, 1)).expand(3, 4, 2, 8)  # no storage behind it
    far = torch.empty((3, 4, 2, 8), device="meta").as_strided((3, 4, 2, 8), (2**40, 16, 8, 1))
    assert locate(SHAPE, work([[2]]), far).start == 2 * 2**40
    assert locate(SHAPE, work([[2, 0]]), far).places.max() == 2 * 2**40 // 8
    assert locate(SHAPE, work([[2, 0]]), cache).last == 0
