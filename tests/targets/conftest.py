"""Compiling the kernels ahead of time for GPUs that this machine does not have, and the report of what came out.

The launcher builds the call; a recorder takes it instead of the GPU, and its arguments become the compiler's signature.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")

from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from attnmux.backends._triton_step import features_of, room_for  # noqa: E402
from attnmux.dispatch.device import Device  # noqa: E402
from attnmux.dispatch.devices import resolve  # noqa: E402
from attnmux.dispatch.registry import Registry  # noqa: E402
from attnmux.dispatch.spec import AttentionSpec  # noqa: E402
from attnmux.kernels.triton import launch  # noqa: E402
from attnmux.kernels.triton.config import LaunchConfig, Target, launch_config, shared_memory  # noqa: E402

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}
GPUS = {"sm80": ("cuda", 80, 32), "sm90": ("cuda", 90, 32), "sm100": ("cuda", 100, 32), "sm120": ("cuda", 120, 32)}
GPUS |= {"gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64)}
QUERY_LENS = {"long": 3000, "prefill": 100, "verify": 16, "decode": 1}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One attention kernel for one target: what the configuration promised and what the compiler reports, in bytes and registers; ``beside``: what
    the kernels that plan and merge for it spill; ``bound``: the most registers that it may take, so that others find room, or 0.
    """

    target: str
    variant: str
    kind: str
    tile: str
    shared: int
    predicted: int
    limit: int
    registers: int
    spilled: int
    beside: int
    bound: int
    seconds: float


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("targets")
    group.addoption("--all-targets", action="store_true", help="compile every variant for every target, not only a few that stand for them")
    group.addoption("--targets-report", metavar="PATH", type=Path, help="write what came out as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Report(config.getoption("targets_report", None)))


class _Report:
    """Collects what tests record, also from xdist's workers, and writes it at the end."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Compiled] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.rows += [Compiled(**json.loads(value)) for name, value in report.user_properties if name == "compiled"]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.path is not None and not hasattr(session.config, "workerinput"):
            self.path.write_text("\n".join(_markdown(sorted(self.rows, key=lambda r: (list(GPUS).index(r.target), r.variant, r.kind)))) + "\n")


def _markdown(rows: list[Compiled]) -> Iterator[str]:
    versions = f"Triton {triton.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    yield from ("# Compiled for GPUs that were not there", "")
    yield f"Made by `tox run -e targets` on {date.today().isoformat()} with {versions}. Every variant of the attention kernel is compiled ahead"
    yield "of time; shared memory is the compiler's figure, registers and spills come from the assembled code. A spill is bytes of stack a"
    yield "thread (NVIDIA) or vector registers (AMD). The tests hold shared memory below what the configuration predicts, the prediction below"
    yield "what a block of the device may use, and the defaults without spills on sm80, sm90 and gfx942, but for 16 bytes where registers are bounded"
    yield "so that another program finds room, and 160 in tiles of long steps, which were timed with them."
    yield from ("", "| target | kernels | most shared memory | limit | spilling defaults | spilling, of all |", "|---|---|---|---|---|---|")
    for target in GPUS:
        mine = [r for r in rows if r.target == target]
        if mine:
            most, plain = max(mine, key=lambda r: r.shared), [r for r in mine if r.variant.startswith("D")]
            spills = f"{sum(r.spilled > 0 for r in plain)} of {len(plain)} | {sum(r.spilled > 0 for r in mine)} of {len(mine)}"
            yield f"| {target} | {len(mine)} | {most.shared} ({most.variant} {most.kind}) | {most.limit} | {spills} |"
    yield from (
        "",
        "## Defaults",
        "",
        "32 query and 8 KV heads, pages of 16, causal, bf16 where nothing else is said. Each cell: rows x keys of a tile, warps,",
    )
    yield from ("stages; KiB of shared memory; registers a thread; what spills.", "")
    yield from ("| kernel | " + " | ".join(GPUS) + " |", "|---" * (len(GPUS) + 1) + "|")
    cells = {(r.variant, r.kind, r.target): _cell(r) for r in rows}
    for variant, kind in dict.fromkeys((r.variant, r.kind) for r in rows if r.variant.startswith("D")):
        yield f"| {variant} {kind} | " + " | ".join(cells.get((variant, kind, target), "") for target in GPUS) + " |"
    yield from ("", "## Spills beyond the defaults", "")
    for r in rows:
        if r.spilled and not r.variant.startswith("D"):
            yield f"- {r.target}: {r.variant}, {r.kind}: {_cell(r)}"


def _cell(r: Compiled) -> str:
    return f"{r.tile}; {r.shared / 1024:.0f}; {r.registers}" + (f"; **{r.spilled}**" if r.spilled else "")


class Recorder:
    """Stands in for a kernel and keeps the arguments of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append(dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs)


@pytest.fixture(scope="session")
def gpus() -> dict[str, Device]:
    """The targets as the platforms describe them."""
    catalog = Registry(entry_points=False).catalog
    return {name: resolve(f"{'rocm' if kind == 'hip' else 'cuda'}:{name}", catalog, ()) for name, (kind, _, _) in GPUS.items()}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """The launcher's kernels by name, none of which runs."""
    found = {name: Recorder(getattr(launch, name)) for name in ("plan_step", "paged_attention", "combine", "merge", "write_cache")}
    for name, recorder in found.items():
        monkeypatch.setattr(launch, name, recorder)
    return found


@pytest.fixture
def compile_attention(gpus: dict[str, Device], recorded: dict[str, Recorder], record_property: Callable[[str, Any], None]) -> Callable[..., Compiled]:
    """``compile_attention(target, variant, kind, spec)``: the kernels of a step; returns the report on the attention kernel."""

    def compile_all(target: str, variant: str, kind: str, spec: AttentionSpec) -> Compiled:
        device = gpus[target]
        where = Target(device.type, device.arch, device.shared_memory, "tma" in device.features)
        sizes = (spec.head_size, spec.v_head_size, spec.dtype.itemsize, spec.kv_dtype.itemsize)
        config = launch_config(where, "decode" if kind == "verify" else kind, QUERY_LENS[kind], spec.group, *sizes, spec.page_size or 0)
        assert config is not None
        _launch(spec, device, config)
        start = time.perf_counter()
        kernel = compiled(target, recorded["paged_attention"])
        seconds = time.perf_counter() - start
        bound = getattr(kernel.metadata, "maxnreg", None) or 0
        beside = sum(resources(target, compiled(target, recorded[name]))[1] for name in ("combine", "plan_step"))
        tile = f"{config.block_m}x{config.block_n}, {config.num_warps}, {config.num_stages}"
        predicted = shared_memory(where, config, *sizes, spec.page_size or 0)
        found = Compiled(
            target, variant, kind, tile, kernel.metadata.shared, predicted, where.shared_memory, *resources(target, kernel), beside, bound, seconds
        )
        record_property("compiled", json.dumps(asdict(found)))
        return found

    return compile_all


def _launch(spec: AttentionSpec, device: Device, config: LaunchConfig) -> None:
    """A launch over small host tensors; only their types and strides matter."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    place = (64, spec.num_kv_heads) if spec.page_size is None else (4, spec.page_size, spec.num_kv_heads)
    if spec.kv_layout == "HND":
        place = (4, spec.num_kv_heads, spec.page_size)
    k, v = (torch.zeros((*place, size), dtype=torch.uint8).to(spec.kv_dtype) for size in (spec.head_size, spec.v_head_size))
    if spec.kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    q = torch.zeros(16, spec.num_q_heads, spec.head_size, dtype=spec.dtype).to(spec.q_dtype)
    out = torch.zeros(16, spec.num_q_heads, spec.v_head_size, dtype=spec.dtype)
    lse = torch.zeros(16, spec.num_q_heads) if spec.return_lse else None
    rows = launch.Rows(
        ints(17) if spec.page_size is None else ints(16, 16),
        prefix_lens=ints(16) if spec.rswa_window else None,
        causal=torch.zeros(16, dtype=torch.bool) if spec.causal == "per_sequence" else None,
        row_span_start=ints(17) if spec.mm_prefix else None,
        row_spans=ints(4, 3) if spec.mm_prefix else None,
        groups=spec.mm_prefix is not None,
    )
    slots = torch.zeros(2, spec.num_kv_heads, config.block_m, spec.v_head_size)
    cut = 32 if spec.batch_invariant else 0
    room = room_for(16, 16, config.programs, spec.num_kv_heads, cut)
    tables = room.tables(16, torch.device("cpu"))
    work = launch.Work((1, 16), slot_out=slots, slot_lse=slots[..., 0].contiguous(), config=config, room=room.at_once, cut_tiles=cut, **tables)
    scale = torch.ones(spec.num_kv_heads if spec.kv_scale == "head" else 1) if spec.kv_scale else None
    heads = torch.zeros(spec.num_q_heads)
    q_scale = None if spec.q_dtype == spec.dtype else torch.ones(1)
    layer = launch.Layer(heads if spec.sinks else None, heads if spec.alibi else None, q_scale, scale, scale)
    features = features_of(spec, device)
    launch.plan(rows, launch.Lengths(16, ints(17), ints(16)), work, features, spec.group)
    launch.attend(q, k, v, out, lse, rows, work, features, layer)


def compiled(target: str, recorder: Recorder) -> Any:
    """The recorded call of a kernel, compiled as a launch on that target would compile it."""
    kernel, arguments = recorder.kernel, recorder.calls.pop()
    signature, constants, attributes = {}, {}, {}
    for i, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = arguments.pop(name)
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=triton.backends.compiler.GPUTarget(*GPUS[target]), options=arguments)


def resources(target: str, kernel: Any) -> tuple[int, int]:
    """Registers a thread, and what it spills: bytes of stack, or vector registers on AMD."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        return tuple(int(re.search(rf"\.{name}:\s*(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count"))  # type: ignore[index,return-value]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


@pytest.fixture
def compile_recorded() -> Callable[[str, Recorder], Any]:
    return compiled


@pytest.fixture
def launched(gpus: dict[str, Device], recorded: dict[str, Recorder]) -> Callable[..., dict[str, Any]]:
    """``launched(target, spec)``: the arguments of the attention kernel's launch for prefill."""

    def arguments(target: str, spec: AttentionSpec) -> dict[str, Any]:
        device = gpus[target]
        sizes = (spec.group, spec.head_size, spec.v_head_size, spec.dtype.itemsize, spec.kv_dtype.itemsize, spec.page_size or 0)
        config = launch_config(Target(device.type, device.arch, device.shared_memory, "tma" in device.features), "prefill", 100, *sizes)
        assert config is not None
        _launch(spec, device, config)
        return recorded["paged_attention"].calls.pop()

    return arguments
