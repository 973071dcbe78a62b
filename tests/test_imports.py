"""Who may import whom, read from the source; and what importing attnmux loads, seen in fresh processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("dispatch", "backends", "platforms", "kernels")
HOST = (
    "attention",
    "cli",
    "config",
    "config_file",
    "demo",
    "devices",
    "host",
    "integrations",
    "operator",
    "plan",
    "registry",
    "selector",
    "steering",
)
"""What is not the contract: a plugin that needs one of these would tie itself to the dispatcher."""

MAY_IMPORT = {
    "kernels": ("torch", "triton", "attnmux.kernels"),
    "platforms": ("torch", "attnmux.dispatch", "attnmux.platforms"),
    "dispatch": ("torch", "pluggy", "tomli", "attnmux"),
}
"""Besides the standard library, when a module is imported."""

OPTIONAL = {
    "dispatch": {"packaging", "platformdirs", "rich", "transformers", "gguf", "hypothesis", "pytest", "_pytest"},
    "backends": {"flash_attn", "flashinfer", "aiter", "intel_extension_for_pytorch", "vllm_xpu_kernels", "triton"},
    "platforms": set(),
    "kernels": {"numpy"},
}
"""What may be imported where it is used: inside functions, or by modules that are themselves loaded on first use."""

LAZY_ROOMS = (
    "dispatch/cli/",
    "dispatch/demo/",
    "dispatch/testing/strategies.py",
    "dispatch/testing/pytest_plugin.py",
    "dispatch/testing/kit.py",
    "dispatch/integrations/",
)


@dataclass(frozen=True)
class Import:
    path: str
    line: int
    module: str
    deferred: bool
    relative: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    name = str(path.relative_to(ROOT))

    def walk(node: ast.AST, deferred: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            later = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(child)
            if isinstance(child, ast.Import):
                yield from (Import(name, child.lineno, alias.name, deferred, False) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                yield Import(name, child.lineno, base, deferred, child.level > 0)
                yield from (
                    Import(name, child.lineno, f"{base}.{alias.name}", deferred, False) for alias in child.names if base.startswith("attnmux")
                )
            yield from walk(child, later)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), False)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


IMPORTS = {room: [found for path in sorted((ROOT / room).rglob("*.py")) for found in imports_of(path)] for room in ROOMS}
EVERYTHING = [found for room in IMPORTS.values() for found in room]


def said(found: list[Import]) -> str:
    return "\n".join(map(str, found))


def test_the_rooms_are_read() -> None:
    assert all(len(IMPORTS[room]) > 10 for room in ROOMS)
    deferred = [i for i in IMPORTS["dispatch"] if i.deferred]
    assert any(i.module == "packaging.specifiers" for i in deferred)
    assert any(i.module == "attnmux.dispatch.catalog" and i.path == "dispatch/steering.py" for i in deferred)


def test_nobody_imports_a_top_folder_by_its_bare_name() -> None:
    assert not [i for i in EVERYTHING if i.top in (*ROOMS, "tests", "benchmarks")]


def test_imports_are_absolute_and_the_front_door_is_imported_by_its_name() -> None:
    assert not [i for i in EVERYTHING if i.relative]
    assert not [i for i in EVERYTHING if "_root" in i.module]


@pytest.mark.parametrize("room", ["backends", "platforms", "kernels"])
def test_dispatch_never_imports_a(room: str) -> None:
    assert not (found := [i for i in IMPORTS["dispatch"] if i.module.startswith(f"attnmux.{room}")]), said(found)


def test_platforms_import_the_contract_only() -> None:
    wrong = [i for i in IMPORTS["platforms"] if i.top == "attnmux" and not i.module.startswith(("attnmux.dispatch", "attnmux.platforms"))]
    wrong += [i for i in IMPORTS["platforms"] if i.module.startswith("attnmux.dispatch.") and i.module.split(".")[2] in HOST]
    assert not wrong, said(wrong)


def test_backends_import_the_contract_and_kernels_only() -> None:
    allowed = ("attnmux.dispatch", "attnmux.kernels", "attnmux.backends")
    wrong = [i for i in IMPORTS["backends"] if i.top == "attnmux" and not i.module.startswith(allowed)]
    wrong += [i for i in IMPORTS["backends"] if i.module.startswith("attnmux.dispatch.") and i.module.split(".")[2] in HOST]
    assert not wrong, said(wrong)


def test_kernels_import_torch_and_triton_only() -> None:
    wrong = [i for i in IMPORTS["kernels"] if i.top == "attnmux" and not i.module.startswith("attnmux.kernels")]
    assert not wrong, said(wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_third_parties(room: str) -> None:
    third = [i for i in IMPORTS[room] if i.top not in sys.stdlib_module_names and i.top not in ("attnmux", "__future__")]
    always = {name.partition(".")[0] for name in MAY_IMPORT.get(room, ("torch",))}
    unknown = [i for i in third if i.top not in always | OPTIONAL[room]]
    assert not unknown, said(unknown)
    early = [i for i in third if i.top not in always and not i.deferred and room == "dispatch" and not i.path.startswith(LAZY_ROOMS)]
    assert not early, said(early)


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"ATTNMUX_CONFIG": ""})
    return set(done.stdout.split())


def test_import_attnmux_loads_nothing_else() -> None:
    before, after = loaded_after(""), loaded_after("import attnmux")
    own = {"attnmux"} | {name for name in after - before if name.startswith("__editable__")}
    assert {name for name in after - before - own if name not in sys.stdlib_module_names} == set()


def test_a_selection_loads_torch_and_pluggy_and_no_optional_package_and_makes_no_cuda_context() -> None:
    torch_alone = loaded_after("import torch")
    code = "import torch, attnmux; s = attnmux.AttentionSpec(8, 2, 64, torch.bfloat16); attnmux.select(s, 'cuda:sm90').explain(); attnmux.devices()"
    code += "; assert not torch.cuda.is_initialized()"
    own = loaded_after(code) - torch_alone
    third = {name for name in own if name not in sys.stdlib_module_names and not name.startswith("__editable__")}
    assert third <= {"attnmux", "pluggy", "packaging"}


def test_public_names_are_sorted_and_there() -> None:
    import attnmux
    import attnmux.plugin
    import attnmux.testing

    for module in (attnmux, attnmux.testing):
        assert list(module.__all__) == sorted(module.__all__)
    assert sorted(attnmux.plugin.__all__) == sorted(set(attnmux.plugin.__all__))
    for module in (attnmux, attnmux.plugin, attnmux.testing):
        for name in module.__all__:
            assert getattr(module, name) is not None
    assert set(attnmux.__all__) <= set(dir(attnmux))
    assert attnmux.__version__
    with pytest.raises(AttributeError, match="module 'attnmux' has no attribute 'atention'"):
        attnmux.atention  # noqa: B018


def test_the_lazy_names_and_the_typed_ones_agree() -> None:
    """Type checkers read the block under TYPE_CHECKING, Python the table."""
    import attnmux

    tree = ast.parse((ROOT / "dispatch/_root/__init__.py").read_text())
    [block] = [node for node in tree.body if _is_type_checking(node)]
    typed = {alias.asname: node.module for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == {name: f"attnmux.dispatch.{home}" for name, home in attnmux._HOMES.items()}


def test_everything_public_is_documented() -> None:
    import attnmux
    import attnmux.plugin

    missing = [n for m in (attnmux, attnmux.plugin) for n in m.__all__ if (callable(v := getattr(m, n)) and not (v.__doc__ or "").strip())]
    assert not missing
