"""One step's rows: :class:`Batch`. Lengths live on the device; host mirrors spare the plan a synchronisation."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnmux.dispatch.query import Lengths

Span = tuple[int, int, int | None]
"""Half-open ``[start, end)`` of positions in a row, and the group it shares sight with (``None``: its own)."""


@dataclass(slots=True, eq=False)
class Batch:
    """What an engine knows of one step. Nothing is copied or checked here; ``Attention.plan`` checks it against the spec.

    Args:
        query_start_loc: int32 ``[seqs + 1]``, running sum of query lengths, from 0.
        seq_lens: int32 ``[seqs]``, keys of each row, the new ones included (cross: the encoder's keys).
        block_table: int32 ``[seqs, cols]``, page ids; entries whose keys nobody may see are never read.
        kv_start_loc: int32 ``[seqs + 1]``, packed keys only: row ``i`` owns ``seq_lens[i]`` keys from ``kv_start_loc[i]``.
        causal: bool ``[seqs]`` for ``causal="per_sequence"``.
        prefix_lens: int32 ``[seqs]`` for R-SWA; may exceed ``seq_lens``.
        query_lens_cpu: exact query lengths on the host.
        seq_lens_cpu: key lengths on the host, exact or an upper bound, as ``lengths`` says.
        mm_spans: for each row the ``(start, end)`` or ``(start, end, group)`` of its multimodal spans, half-open.
        lengths: ``"exact"`` or ``"upper_bound"``.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor | None = None
    kv_start_loc: Tensor | None = None
    causal: Tensor | None = None
    prefix_lens: Tensor | None = None
    query_lens_cpu: Sequence[int] | None = None
    seq_lens_cpu: Sequence[int] | None = None
    mm_spans: Sequence[Sequence[Sequence[int]]] | None = None
    lengths: Lengths = "exact"
    _query_lens: list[int] | None = field(default=None, init=False, repr=False)
    _seq_lens: list[int] | None = field(default=None, init=False, repr=False)
    _longest_query: int | None = field(default=None, init=False, repr=False)
    _longest_keys: int | None = field(default=None, init=False, repr=False)

    @property
    def num_seqs(self) -> int:
        return int(self.seq_lens.shape[0])

    @property
    def query_lens(self) -> list[int]:
        """Query lengths on the host: the mirror, or copied from the device once."""
        if self._query_lens is None:
            if self.query_lens_cpu is not None:
                self._query_lens = list(map(operator.index, self.query_lens_cpu))
            else:
                self._query_lens = (self.query_start_loc[1:] - self.query_start_loc[:-1]).tolist()
        return self._query_lens

    @property
    def key_lens(self) -> list[int]:
        """Key lengths on the host: the mirror (a bound where ``lengths`` says so), or copied from the device once."""
        if self._seq_lens is None:
            if self.seq_lens_cpu is not None:
                self._seq_lens = list(map(operator.index, self.seq_lens_cpu))
            else:
                self._seq_lens = self.seq_lens.tolist()
        return self._seq_lens

    @property
    def longest_query(self) -> int:
        """Query tokens of the longest row."""
        if self._longest_query is None:
            self._longest_query = max(self.query_lens, default=0)
        return self._longest_query

    @property
    def longest_keys(self) -> int:
        """Keys of the longest row, as :attr:`key_lens` has them."""
        if self._longest_keys is None:
            self._longest_keys = max(self.key_lens, default=0)
        return self._longest_keys

    def forget(self) -> None:
        """Drop what was copied to the host: the tensors may have been filled anew since."""
        self._query_lens = self._seq_lens = self._longest_query = self._longest_keys = None

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows; tokens of ``q`` beyond them are padding."""
        return sum(self.query_lens)

    def spans(self, row: int) -> list[Span]:
        """The row's spans with their groups, those that start beyond the row's keys left out."""
        if self.mm_spans is None:
            return []
        length = self.key_lens[row]
        return [(int(s[0]), int(s[1]), int(s[2]) if len(s) > 2 else None) for s in self.mm_spans[row] if s[0] < length]

    def take(self, rows: Sequence[int]) -> Batch:
        """The batch of some rows, their tokens packed anew in the order given; tables stay on the device."""
        index = torch.tensor(list(rows), dtype=torch.int64).to(self.seq_lens.device, non_blocking=True)  # nothing here waits for the device
        lens = [self.query_lens[r] for r in rows]
        starts = torch.tensor([0, *lens], dtype=torch.int64).cumsum(0).to(torch.int32)

        def pick(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.index_select(0, index)

        part = Batch(
            query_start_loc=starts.to(self.query_start_loc.device, non_blocking=True),
            seq_lens=self.seq_lens.index_select(0, index),
            block_table=pick(self.block_table),
            kv_start_loc=None if self.kv_start_loc is None else self.kv_start_loc,
            causal=pick(self.causal),
            prefix_lens=pick(self.prefix_lens),
            query_lens_cpu=lens,
            seq_lens_cpu=[self.key_lens[r] for r in rows],
            mm_spans=None if self.mm_spans is None else [self.mm_spans[r] for r in rows],
            lengths=self.lengths,
        )
        if self.kv_start_loc is not None:  # a start a row; ends are starts + seq_lens, so gaps between rows are fine
            part.kv_start_loc = torch.cat((self.kv_start_loc.index_select(0, index), self.kv_start_loc[-1:]))
        return part
