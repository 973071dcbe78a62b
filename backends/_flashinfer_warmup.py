"""Building FlashInfer's modules ahead: side by side, since nvcc takes half a minute a source file, then each run once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from attnmux.backends._flashinfer_modules import FA3_QUERY_LEN, Module
from attnmux.backends._triton_warmup import layers, one_row, pools
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.spec import AttentionSpec, Limits

if TYPE_CHECKING:
    from attnmux.backends.flashinfer_backend import FlashInferBackend


def build(modules: Sequence[Module]) -> None:
    """Compile and load what is not built yet, all modules at once.

    Raises:
        RuntimeError: a module fails; the message names it and carries the compiler's output.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(modules))) as workers:
        running = [(module, workers.submit(load, module)) for module in modules]
        failed = [(module, error) for module, future in running if (error := future.exception()) is not None]
    if failed:
        names = ", ".join(module.name for module, _ in failed)
        raise RuntimeError(f"FlashInfer could not build {names}: {failed[0][1]}") from failed[0][1]


def load(module: Module) -> Any:
    """One module as the wrapper will ask for it, so that it finds it built and loaded."""
    from importlib import import_module

    prefill: Any = import_module("flashinfer.prefill")
    if module.kind == "stock":
        types = (module.dtype, module.kv_dtype, module.dtype, torch.int32, module.head_size, module.v_head_size)
        return prefill.get_batch_prefill_module(module.kernel, *types, 0, module.window, False, False)
    if module.kind == "variant":
        return prefill.get_customize_batch_prefill_module(module.kernel, *module.jit_args(), **module.jit_kwargs())
    ranges: Any = import_module("flashinfer.jit.attention.modules")
    types = (module.dtype, module.kv_dtype, module.dtype, torch.int32, module.head_size, module.v_head_size)
    spec = ranges.get_batch_prefill_bidirectional_ranges_spec(*types)
    given = ranges.batch_prefill_bidirectional_ranges_jit_args(spec)
    return prefill.get_customize_batch_prefill_module(spec["backend"], *given, **spec["jit_kwargs"])


def warm_up(backend: FlashInferBackend, modules: Sequence[Module], limits: Limits, device: torch.device) -> None:
    """Build the modules, then run a row of each kind. Pools whose keys and values have unlike strides need one more module of the stock
    kernels, which FlashInfer builds when it first sees them.
    """
    build(modules)
    spec = backend.spec
    for batch in _steps(spec, limits, device):
        q = torch.zeros((batch.num_tokens, spec.num_q_heads, spec.head_size), dtype=spec.dtype, device=device)
        out = torch.empty((batch.num_tokens, spec.num_q_heads, spec.v_head_size), dtype=spec.dtype, device=device)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=device) if spec.return_lse else None
        k, v = pools(spec, device, max(batch.key_lens))
        state = backend.plan(batch, None, None)
        for layer in layers(spec, device):
            backend.run(q, k, v, state, out, lse, layer)


def _steps(spec: AttentionSpec, limits: Limits, device: torch.device) -> Iterator[Batch]:
    """A short row, a long one where the limits have room for it, and rows with spans of both kinds."""
    longest = limits.max_query_len if spec.attn_type == "cross" else min(limits.max_query_len, limits.max_seq_len)
    for length in dict.fromkeys((1, min(longest, FA3_QUERY_LEN))):
        yield one_row(spec, device, length, length, ())
    if spec.mm_prefix is not None:
        yield one_row(spec, device, 1, 1, (0, 1))
        if longest > 1:
            shared = one_row(spec, device, 2, 2, (0, 1))
            shared.mm_spans = [[(0, 1, 0), (1, 2, 0)]]
            yield shared
