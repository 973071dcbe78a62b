"""Wheel and sdist hold exactly the package, and every folder of it is listed."""

from __future__ import annotations

import configparser
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def listed(key: str) -> list[str]:
    return setup_cfg()["options"][key].split("\n")[1:]


FOLDERS = dict(line.split(" = ") for line in listed("package_dir"))


def package_of(folder: Path) -> str:
    """The import name of a source folder, by the longest entry of ``package_dir`` that holds it."""
    name = folder.relative_to(ROOT).as_posix()
    package, base = max(((p, f) for p, f in FOLDERS.items() if name == f or name.startswith(f + "/")), key=lambda entry: len(entry[1]))
    return ".".join([package, *name.removeprefix(base).strip("/").split("/")]).rstrip(".")


SOURCES = sorted(path for room in ("dispatch", "backends", "platforms", "kernels") for path in (ROOT / room).rglob("*.py"))


def test_every_folder_with_code_is_a_listed_package() -> None:
    """An editable install finds folders that are not listed; a wheel would lack them."""
    assert {package_of(path.parent) for path in SOURCES} == set(listed("packages"))
    assert all((path.parent / "__init__.py").is_file() for path in SOURCES)


def test_the_tree_for_type_checkers_mirrors_the_package() -> None:
    tree = ROOT / "tests/typing/attnmux"
    expected = {path.name: path for path in (ROOT / "dispatch/_root").iterdir() if path.name != "__pycache__"}
    expected |= {name.partition(".")[2]: ROOT / folder for name, folder in FOLDERS.items() if "." in name}
    assert {link.name for link in tree.iterdir() if link.name != "__pycache__"} == set(expected)
    assert all((tree / name).is_symlink() and (tree / name).resolve() == target.resolve() for name, target in expected.items())


def test_the_version_is_written_once() -> None:
    import attnmux

    assert setup_cfg()["metadata"]["version"] == "attr: dispatch._root._version.__version__"
    assert (ROOT / "dispatch/_root/_version.py").read_text() == f'__version__ = "{attnmux.__version__}"\n'


def test_extras() -> None:
    extras = setup_cfg()["options.extras_require"]
    assert set(extras) == {"flashinfer", "flash-attn", "ipex", "helion", "transformers", "all"}
    assert "ipex" not in extras["all"]
    assert all(name in extras["all"] for name in ("flashinfer", "flash-attn", "helion", "transformers"))


needs_build = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("build", "setuptools")), reason="needs the packages build and setuptools"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str], str]:
    """Names in the wheel, names in the sdist, and the wheel's metadata; built without an index from a copy."""
    copy, out = tmp_path_factory.mktemp("copy") / "attnmux", tmp_path_factory.mktemp("out")
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED, symlinks=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if not name.endswith("/")}
        [metadata] = [name for name in in_wheel if name.endswith("/METADATA")]
        text = archive.read(metadata).decode()
    with tarfile.open(sdist) as tar:
        in_sdist = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
    return in_wheel, in_sdist, text


@needs_build
def test_the_wheel_is_exactly_the_package(built: tuple[set[str], set[str], str]) -> None:
    in_wheel, _, _ = built
    expected = {f"{package_of(path.parent).replace('.', '/')}/{path.name}" for path in SOURCES} | {"attnmux/py.typed"}
    info = {name for name in in_wheel if ".dist-info/" in name}
    assert in_wheel - info == expected
    assert {name.partition("/")[2] for name in info} == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}


@needs_build
def test_the_sdist_is_the_package_and_what_builds_it(built: tuple[set[str], set[str], str]) -> None:
    _, in_sdist, _ = built
    beside = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    beside |= {"MANIFEST.in"} if (ROOT / "MANIFEST.in").exists() else set()
    sources = {path.relative_to(ROOT).as_posix() for path in SOURCES} | {"dispatch/_root/py.typed"}
    found = {name for name in in_sdist if ".egg-info/" not in name}
    assert found == sources | beside


@needs_build
def test_the_metadata(built: tuple[set[str], set[str], str]) -> None:
    _, _, text = built
    header, _, body = text.partition("\n\n")
    for line in ("Name: attnmux", "License-Expression: Apache-2.0", "License-File: LICENSE", "Requires-Python: >=3.10", "Provides-Extra: ipex"):
        assert line in header.splitlines()
    assert body.strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
