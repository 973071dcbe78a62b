"""One backend's share of a plan: its rows, passed as a view or gathered, and what a CUDA graph that holds them may replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnmux.dispatch.backend import Backend, LayerArgs
from attnmux.dispatch.errors import complaint
from attnmux.dispatch.rows import Group


@dataclass(slots=True)
class Part:
    """One backend's rows.

    Args:
        group: which rows and tokens.
        seqs: how many rows the backend prepared: the group's, or those of the whole batch.
        backend: runs them.
        state: what the backend prepared.
        index: int64 token indices to gather and scatter, ``None`` where a view does.
        stream: where ``index`` was written, on a GPU.
        captured: a CUDA graph holds launches of it.
    """

    group: Group
    seqs: int
    backend: Backend
    state: Any
    index: Tensor | None
    stream: torch.cuda.Stream | None = None
    captured: bool = False

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None, layer: LayerArgs) -> None:
        """Run on this part's tokens; what is not theirs is not touched."""
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        self.captured |= capturing
        if self.index is None:
            if first := self.group.first:  # what lies behind its own tokens is padding to the backend
                q, out, lse = q[first:], out[first:], None if lse is None else lse[first:]
            self.backend.run(q, k_cache, v_cache, self.state, out, lse, layer)
            return
        if self.stream is not None and not capturing and (here := torch.cuda.current_stream(q.device)) != self.stream:
            here.wait_stream(self.stream)
            self.index.record_stream(here)
        part_q = q.index_select(0, self.index)
        part_out = torch.empty((part_q.shape[0], *out.shape[1:]), dtype=out.dtype, device=out.device)
        part_lse = None if lse is None else torch.empty(part_q.shape[:2], dtype=lse.dtype, device=lse.device)
        self.backend.run(part_q, k_cache, v_cache, self.state, part_out, part_lse, layer)
        out.index_copy_(0, self.index, part_out)
        if lse is not None and part_lse is not None:
            lse.index_copy_(0, self.index, part_lse)

    def check_replay(self, groups: Sequence[Group], whole: bool, query_lens: Sequence[int]) -> None:
        """Whether a graph that holds this part's launches does the right thing in a step of other groups.

        Raises:
            ValueError: its rows are others now, or their tokens are where the graph does not look for them.
        """
        if not self.captured:
            return
        name, rows = self.group.backend, self.group.rows
        now = next((group for group in groups if (group.backend, group.row_class) == (name, self.group.row_class)), None)
        if now is not None and (len(query_lens) if whole else len(now.rows)) == self.seqs and (whole or now.rows == rows):
            if self.index is None and now.tokens is not None and now.first == self.group.first:
                return
            if self.index is not None and now.tokens is None and sum(query_lens[row] for row in now.rows) == self.index.numel():
                return
        where = f"from token {self.group.first} on" if self.index is None else f"{self.index.numel()} tokens of them gathered"
        offered = f"a plan whose rows {list(rows)} of {name}, {where}, are in a CUDA graph"
        raise ValueError(complaint("into", offered, "the same rows with their tokens at the same place", "make a new plan and capture that"))


def token_index(rows: Sequence[int], query_lens: Sequence[int], device: torch.device) -> Tensor:
    """int64 ``[tokens]``: where the tokens of some rows stand in the batch. Copied without waiting."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
    return torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows]).to(device, non_blocking=True)
