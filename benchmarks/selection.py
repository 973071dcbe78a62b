"""What asking costs: importing attnmux beyond torch, a remembered answer, and one that has to be worked out.

    python benchmarks/selection.py [--json results.json]

Each number is the best of several runs: anything else on the machine can only add to it. Imports are wall-clock time,
the rest is processor time.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch

import attnmux
from attnmux.dispatch import host
from attnmux.dispatch.devices import resolve
from attnmux.dispatch.selector import decide
from attnmux.dispatch.steering import combine

GOALS = {"import": 50e-3, "remembered": 5e-6, "worked out": 2e-3}
IMPORTS = {
    "import attnmux": "import attnmux",
    "import attnmux, then attnmux.select": "import attnmux; attnmux.select",
    "import attnmux, then attnmux.Attention": "import attnmux; attnmux.Attention",
}
PLAIN: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
SPECS = {
    "plain decoder": attnmux.AttentionSpec(**PLAIN),
    "image spans, head size 256": attnmux.AttentionSpec(**{**PLAIN, "head_size": 256, "mm_prefix": "override_window", "page_size": 64}),
    "sinks, window, fp8 keys, LSE": attnmux.AttentionSpec(
        **PLAIN, sinks=True, sliding_window=128, kv_dtype=torch.float8_e4m3fn, kv_scale="head", return_lse=True
    ),
    "a page size that few take": attnmux.AttentionSpec(**PLAIN, page_size=48),
}
DEVICES = ("cuda:sm80", "cuda:sm90", "cuda:sm100", "rocm:gfx942", "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7, help="runs of which the best counts")
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()
    results = [*imports(args.repeat), *remembered(args.repeat), *worked_out(args.repeat)]
    print(
        f"attnmux {attnmux.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.processor() or platform.machine()}"
    )
    print(f"{'what':12} {'case':52} {'microseconds':>13} {'goal':>8}")
    for result in results:
        print(
            f"{result['what']:12} {result['case']:52} {result['seconds'] * 1e6:13.2f} {result['goal'] * 1e6:8.0f}{'' if result['met'] else '  missed'}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"attnmux": attnmux.__version__, "torch": torch.__version__, "results": results}, file, indent=2)
    raise SystemExit(0 if all(result["met"] for result in results) else 1)


def measured(what: str, case: str, seconds: float) -> dict[str, Any]:
    return {"what": what, "case": case, "seconds": seconds, "goal": GOALS[what], "met": seconds <= GOALS[what]}


def imports(repeat: int) -> list[dict[str, Any]]:
    """In fresh processes that have imported torch already."""
    script = "import time, torch\nstart = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"

    def once(code: str) -> float:
        return float(subprocess.run([sys.executable, "-c", script.format(code)], capture_output=True, text=True, check=True).stdout)

    return [measured("import", case, min(once(code) for _ in range(repeat))) for case, code in IMPORTS.items()]


def best(call: Callable[[], object], number: int, repeat: int) -> float:
    call()
    return min(timeit.repeat(call, timer=time.process_time, number=number, repeat=repeat)) / number


def remembered(repeat: int) -> list[dict[str, Any]]:
    """``select`` with arguments it has seen."""
    spec = SPECS["plain decoder"]
    asked: dict[str, Callable[[], object]] = {
        "select(spec)": lambda: attnmux.select(spec),
        'select(spec, "cuda:sm90")': lambda: attnmux.select(spec, "cuda:sm90"),
        'select(spec, "cuda:sm90", prefer={...})': lambda: attnmux.select(spec, "cuda:sm90", prefer={"decode": "triton"}),
    }
    return [measured("remembered", case, best(call, 20_000, repeat)) for case, call in asked.items()]


def worked_out(repeat: int) -> list[dict[str, Any]]:
    """The selector itself, with the registry loaded and the machine known."""
    catalog, here = host.registry().catalog, host.host()
    steered = combine((), catalog)
    results = []
    for case, spec in SPECS.items():
        for name in DEVICES:
            device = resolve(name, catalog, here.devices)
            seconds = best(lambda: decide(spec, device, "exact", catalog, here.toolchain, steered), 20, repeat)  # noqa: B023  # called at once
            results.append(measured("worked out", f"{case}, {name}", seconds))
    return results


if __name__ == "__main__":
    main()
