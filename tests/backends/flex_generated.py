"""Runs the Triton kernel that torch generates for FlexAttention on a GPU, without one: ``TRITON_INTERPRET=1 python flex_generated.py``.

It reaches into the compiler of torch 2.13: the lowering takes its GPU path, and what would be launched is interpreted. Prints one
JSON object a case: the error as part of what is allowed, over a pool full of NaN, and how many graphs were compiled so far.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as settings
import torch._inductor.kernel.flex.flex_attention as lowering
import triton
from torch._inductor import graph as inductor_graph
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime import triton_heuristics
from torch._inductor.template_heuristics.triton import FlexConfig
from triton.backends.compiler import GPUTarget

import attnmux
from attnmux.backends.flex_backend import FlexBackend
from attnmux.dispatch.spec import AttentionSpec
from attnmux.kernels.flex import run, step
from attnmux.testing import Row, make_case
from attnmux.testing.measure import distance, oracle

BASE = AttentionSpec(4, 2, 16, torch.float32, return_lse=True)
CASES: list[tuple[dict[str, Any], list[list[Row]]]] = [
    ({}, [[Row(1, 37), Row(1, 20)], [Row(3, 50)], [Row(1, 70), Row(0, 3), Row(2, 17), Row(5, 0), Row(1, 16)]]),
    (
        {"num_q_heads": 6, "alibi": "linear", "mm_prefix": "override_window", "sliding_window": 9, "sinks": True},
        [[Row(2, 37, spans=((30, 36),)), Row(1, 20)], [Row(9, 60, spans=((3, 9, 0), (52, 58, 0)))], [Row(20, 40, spans=((2, 7), (22, 33)))]],
    ),
    ({"causal": "per_sequence", "page_size": 32, "alibi": "sqrt"}, [[Row(2, 37, causal=False), Row(1, 70)]]),
    ({"rswa_window": 5}, [[Row(2, 137, prefix_len=20), Row(1, 70)]]),
    ({"chunk": (24, 1), "head_size": 24}, [[Row(2, 137), Row(1, 70)]]),
    ({"attn_type": "cross", "page_size": None}, [[Row(2, 37), Row(1, 70)]]),
]


class Target:
    """A driver for no device: generated code asks it what it is generated for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Interpreted:
    """A generated kernel, launched as torch would."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.template = kernel, "flex" in kernel.fn.__name__

    def run(self, *args: Any, stream: Any = None) -> None:
        if self.template:
            self.kernel[args[-3:]](*args[:-3])
        else:
            self.kernel[(triton.cdiv(args[-1], 256),)](*args, XBLOCK=256)


def take_the_gpus_path(folder: Path) -> list[None]:
    """Changes torch's compiler in this process; returns a list that grows with every graph."""
    settings.cpu_backend, settings.compile_threads, settings.fx_graph_cache = "triton", 1, False
    triton.runtime.driver.set_active(Target())
    source = inspect.getsource(lowering)
    start = source.index("@register_lowering(torch.ops.higher_order.flex_attention,")
    body = source[start : source.index("\n# -", start)].replace('query.get_device().type == "cpu"', "False")
    exec(compile(body, lowering.__file__, "exec"), vars(lowering))
    ours = inspect.getsource(run._run_part).replace('None if q.device.type == "cpu" else ', "")
    exec(compile("from __future__ import annotations\n" + ours, run.__file__, "exec"), vars(run))
    number = itertools.count()

    def load(self: Any, name: str, code: str, *args: Any, **kwargs: Any) -> Any:
        path = folder / f"generated_{next(number)}.py"
        path.write_text(code)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)

    graphs: list[None] = []
    compiled = inductor_graph.GraphLowering.compile_to_module

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        graphs.append(None)
        return compiled(self, *args, **kwargs)

    changes: list[tuple[Any, str, Any]] = [
        (InductorChoices, "get_flex_attention_fwd_configs", lambda self, *args: [FlexConfig(64, 64, 2, 4)]),
        (triton_heuristics, "template", lambda **kwargs: Interpreted),
        (triton_heuristics, "pointwise", lambda *args, **kwargs: Interpreted),
        (AsyncCompile, "triton", load),
        (AsyncCompile, "wait", lambda self, scope: None),
        (inductor_graph.GraphLowering, "compile_to_module", counted),
    ]
    for owner, name, value in changes:
        setattr(owner, name, value)
    return graphs


def error(spec: AttentionSpec, rows: list[Row], seed: int) -> float:
    case = make_case(spec, rows, seed=seed)
    backend = FlexBackend(spec, attnmux.select(spec, "cpu", require="flex").device, {})
    backend._gpu = True
    (out, lse), args = case.outputs(), case.layer_args
    run.run_step(backend.plan(case.batch, None, None), case.q, case.k_cache, case.v_cache, out, lse, args.sinks, args.alibi_slopes, in_place=True)
    want, n = oracle(case), case.batch.num_tokens
    assert lse is not None
    return max(distance(out[:n], want.out) / want.out_allowed, distance(lse[:n], want.lse) / want.lse_allowed)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        graphs = take_the_gpus_path(Path(folder))
        for changes, batches in CASES:
            for seed, rows in enumerate(batches):
                off = error(BASE.replace(**changes), rows, seed)
                print(json.dumps({"changes": str(changes), "rows": len(rows), "error": off, "graphs": len(graphs)}))
                sys.stdout.flush()
        step.apart = lambda tiles, page_size: (list(tiles), [])  # the last page of a row, where it lies
        off = error(BASE, [Row(1, 37), Row(1, 20)], 0)
        print(json.dumps({"changes": "tails in place", "rows": 2, "error": off, "graphs": len(graphs)}))


if __name__ == "__main__":
    main()
