"""Wrong options and settings: one line on standard error, status 2, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from attnmux.dispatch import config

BASE = ("--heads", "8/2", "--head-size", "128", "--dtype", "bf16")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("explain", "--heads", "3/2", "--head-size", "64", "--dtype", "bf16"), "num_q_heads is 3, wanted a multiple of num_kv_heads=2"),
        (("explain", "--heads", "x", "--head-size", "64", "--dtype", "bf16"), "--heads is 'x', wanted Q/KV"),
        (("explain", *BASE[:4], "--dtype", "bf17"), "dtype is 'bf17', wanted one of bf16"),
        (("explain", *BASE, "--page-size", "0"), "page_size is 0, wanted at least 1"),
        (("explain", *BASE, "--page-size", "many"), "--page-size is 'many', wanted a whole number"),
        (("explain", *BASE, "--chunk", "8"), "--chunk is '8', wanted 2 numbers"),
        (("explain", *BASE, "--sinks", "maybe"), "--sinks is 'maybe', wanted yes or no"),
        (("explain", *BASE, "--causal", "maybe"), "causal is 'maybe', wanted one of"),
        (("explain", *BASE, "--softcap", "-1"), "softcap is -1.0, wanted a finite number above 0"),
        (("explain", *BASE, "--sparse", "top-k"), "sparse is 'top-k', wanted None"),
        (("explain", *BASE, "--rswa-window", "8", "--sliding-window", "8"), "rswa_window with sliding_window has no meaning"),
        (("explain", *BASE, "--device", "cuda:sm999x"), "unknown device"),
        (("explain", *BASE, "--prefer", "tritn"), "unknown backend 'tritn'"),
        (("explain", *BASE, "--prefer", "triton,decode=flex"), "--prefer is 'triton,decode=flex', wanted either"),
        (("explain", *BASE, "--windw", "8"), "unrecognized arguments: --windw 8"),
        (("explain", "--heads", "8"), "the following arguments are required: --head-size, --dtype"),
        (("reason", "no-such-code"), "unknown reason code 'no-such-code'"),
        (("check", "--backend", "no_such_backend"), "unknown backend 'no_such_backend'"),
        (("warmup", *BASE, "--device", "cuda:sm90", "--max-num-seqs", "0"), "max_num_seqs is 0, wanted at least 1"),
        (("warmup", *BASE, "--device", "cuda:sm90"), "--device is cuda:sm90, wanted a device of this machine"),
        (("bench", *BASE, "--device", "cpu", "--seqs", "1-4"), "--seqs is '1-4', wanted Q:KV"),
        (("bench", *BASE, "--device", "cpu", "--dtype", "fp32", "--seqs", "9:4"), "--seqs: seq_lens of row 0 is 4"),
        (("explan",), "invalid choice: 'explan'"),
        ((), "the following arguments are required: COMMAND"),
    ],
)
def test_one_line_and_status_2(run, argv, said):
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert err.startswith("attnmux: error: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.fixture
def environment(monkeypatch):
    """Set variables; they are read again now and after the test."""

    def set_variables(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        config.reload_config()

    yield set_variables
    monkeypatch.undo()
    config.reload_config()


def test_an_unknown_variable_is_an_error(run, environment):
    environment(ATTNMUX_PREFR="triton")
    status, out, err = run("devices")
    assert (status, out) == (2, "")
    assert err.startswith("attnmux: error: unknown environment variable ATTNMUX_PREFR: did you mean 'ATTNMUX_PREFER'?")


def test_a_broken_file_is_an_error(run, environment, tmp_path):
    (tmp_path / "attnmux.toml").write_text("prefer = [")
    environment(ATTNMUX_CONFIG=str(tmp_path / "attnmux.toml"))
    status, out, err = run("explain", *BASE, "--device", "cpu")
    assert (status, out) == (2, "")
    assert "attnmux.toml" in err
    assert err.count("\n") == 1


def test_help_and_version_import_neither_torch_nor_rich():
    code = "import sys, contextlib\nfrom attnmux.dispatch.cli import main\n"
    code += "for flag in ('--help', '--version'):\n    with contextlib.suppress(SystemExit): main([flag])\n"
    code += "print('heavy:', *[m for m in ('torch', 'rich', 'pluggy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy:"
    assert "explain" in done.stdout


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m attnmux reason | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "1", "141")
