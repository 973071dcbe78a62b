"""One step of a transformers model over attnmux's paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnmux.dispatch.attention import Attention, Plan
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.demo.scheduler import ScheduledRow
from attnmux.dispatch.errors import complaint
from attnmux.dispatch.integrations.paged import PagedLayer, PagedStep
from attnmux.dispatch.rows import classify
from attnmux.dispatch.selection import Selection
from attnmux.dispatch.spec import AttentionSpec, Limits


def layer_specs(model: Any, page_size: int) -> list[AttentionSpec]:
    """The spec of each attention layer of a decoder, read from its modules and configuration.

    A field that is read wrongly is no risk: :class:`PagedStep` compares every spec with what the layer asks for.

    Raises:
        ValueError: the model has no attention layers that say what they are.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    specs: dict[int, AttentionSpec] = {}
    for module in model.modules():
        if not all(hasattr(module, name) for name in ("layer_idx", "scaling", "head_dim")):
            continue
        kind = "sliding_attention" if kinds is None else kinds[module.layer_idx]
        specs[module.layer_idx] = AttentionSpec(
            config.num_attention_heads,
            config.num_key_value_heads,
            module.head_dim,
            model.dtype,
            scale=float(module.scaling),
            page_size=page_size,
            sliding_window=getattr(config, "sliding_window", None) if kind == "sliding_attention" else None,
            chunk=(config.attention_chunk_size, 0) if kind == "chunked_attention" else None,
            softcap=getattr(config, "attn_logit_softcapping", None),
            sinks=hasattr(module, "sinks"),
        )
    if sorted(specs) != list(range(len(specs))) or not specs:
        raise ValueError(complaint(f"the layers of {type(model).__name__}", sorted(specs), "attention modules numbered from 0 by layer_idx"))
    return [specs[i] for i in range(len(specs))]


class ModelRunner:
    """Holds the pools and the attentions; runs the rows of a step and chooses the next tokens.

    Args:
        model: a decoder loaded with ``attn_implementation="attnmux"``.
        num_pages, page_size: of each layer's pool.
        limits: the largest step.
        device, steering: as for :class:`attnmux.Attention`: ``prefer``, ``require``, ``deny``, ``order``.

    Attributes:
        attentions: spec -> what serves it; layers with equal specs share one, and one plan a step.

    Raises:
        NoBackendError: a spec has no backend.
    """

    def __init__(
        self,
        model: Any,
        num_pages: int,
        page_size: int,
        limits: Limits,
        *,
        device: str | torch.device | None = None,
        **steering: Any,
    ) -> None:
        self.page_size = page_size
        self.specs = layer_specs(model, page_size)
        self.attentions = {spec: Attention(spec, device, limits=limits, **steering) for spec in dict.fromkeys(self.specs)}
        self.device = next(iter(self.attentions.values())).torch_device
        self.model = model.to(self.device)
        self._columns = -(-limits.max_seq_len // page_size)
        self._plans: dict[AttentionSpec, Plan] = {}
        self.pools = [self._pool(spec, num_pages) for spec in self.specs]

    @property
    def selections(self) -> list[Selection]:
        """What was selected for each distinct spec."""
        return [attention.selection for attention in self.attentions.values()]

    @torch.inference_mode()
    def step(self, rows: Sequence[ScheduledRow]) -> list[int]:
        """Compute the rows' tokens.

        Returns:
            The most likely next token of each row that ``samples``, in order.
        """
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        for row in rows:
            first, pages = row.request.computed, row.request.pages
            ids += row.request.tokens(first, row.seq_len)
            positions += range(first, row.seq_len)
            slots += [pages[p // self.page_size] * self.page_size + p % self.page_size for p in range(first, row.seq_len)]
            if row.samples:
                last.append(len(ids) - 1)
        output = self.model(
            input_ids=self._tensor([ids]),
            position_ids=self._tensor([positions]),
            use_cache=False,
            logits_to_keep=self._tensor(last),
            attnmux_plan=PagedStep(self._layers(self._batch(rows)), self._tensor(slots)),
        )
        chosen: list[int] = output.logits[0].argmax(-1).tolist()
        return chosen

    def _batch(self, rows: Sequence[ScheduledRow]) -> Batch:
        query_lens, seq_lens = [row.q_len for row in rows], [row.seq_len for row in rows]
        starts = [sum(query_lens[:i]) for i in range(len(rows) + 1)]
        table = [row.request.pages + [-1] * (self._columns - len(row.request.pages)) for row in rows]
        return Batch(
            query_start_loc=self._tensor(starts, torch.int32),
            seq_lens=self._tensor(seq_lens, torch.int32),
            block_table=self._tensor(table, torch.int32),
            query_lens_cpu=query_lens,
            seq_lens_cpu=seq_lens,
        )

    def _layers(self, batch: Batch) -> list[PagedLayer]:
        """Each layer with this step's plan. A plan is refreshed in place while the rows keep their classes."""
        for spec, attention in self.attentions.items():
            earlier = self._plans.get(spec)
            same = earlier is not None and earlier.row_classes == tuple(classify(spec, batch))
            self._plans[spec] = attention.plan(batch, into=earlier if same else None)
        return [
            PagedLayer(self.attentions[spec], self._plans[spec], k_cache, v_cache)
            for spec, (k_cache, v_cache) in zip(self.specs, self.pools, strict=True)
        ]

    def _pool(self, spec: AttentionSpec, num_pages: int) -> tuple[Tensor, Tensor]:
        shape = (num_pages, self.page_size, spec.num_kv_heads)
        k_cache, v_cache = (torch.empty((*shape, size), dtype=spec.kv_dtype, device=self.device) for size in (spec.head_size, spec.v_head_size))
        return k_cache, v_cache

    def _tensor(self, values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)
