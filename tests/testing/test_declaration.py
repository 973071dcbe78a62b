"""The checks that need no hardware find declarations that are wrong."""

from __future__ import annotations

import os
import sys

import pytest

import attnmux.plugin as amx
from attnmux.dispatch import host
from attnmux.dispatch.registry import Registry
from attnmux.testing import backend_checks
from attnmux.testing.check import CheckFailed


class Raises:
    """A constraint with a mistake in its check."""

    def accepts(self, value, query):
        return value.no_such_attribute

    def wants(self):
        return "something"

    def cell(self):
        return "some"


class Speechless(Raises):
    def accepts(self, value, query):
        return value is None

    def wants(self):
        return ""


class BreaksTheTable(Raises):
    def accepts(self, value, query):
        return value is None

    def cell(self):
        return "a|b"


class Truthy(Raises):
    def accepts(self, value, query):
        return value


WRONG = [
    ("constraints-speak", {"softcap": Raises()}, AttributeError, "no_such_attribute"),
    ("constraints-speak", {"softcap": Speechless()}, CheckFailed, r"claim 1, softcap: wants\(\) is '', wanted a phrase"),
    ("constraints-speak", {"softcap": BreaksTheTable()}, CheckFailed, r"claim 1, softcap: cell\(\) is 'a\|b'"),
    ("constraints-speak", {"softcap": Truthy()}, CheckFailed, r"softcap: accepts\(none\) did not answer True or False"),
    ("claims-can-be-met", {"rswa_window": amx.ON, "sliding_window": amx.ON}, CheckFailed, "claim 1: no combination"),
]


@pytest.mark.parametrize(("name", "claim", "error", "said"), WRONG)
def test_a_wrong_declaration_is_found(declare, name, claim, error, said):
    declare(**claim)
    found = {c.id: c for c in backend_checks("acme", quick=True)}
    with pytest.raises(error, match=said):
        found[f"declaration/{name}"].run()


PLUGIN = """
import torch
import attnmux.plugin as amx
{extra}

attnmux_contract = "1.0"


@amx.hookimpl
def attnmux_backends():
    claim = amx.Claim(device=amx.DeviceSet("cuda:sm90"), head_size=amx.OneOf(64), dtype=amx.OneOf(torch.bfloat16), page_size=amx.OneOf(16))
    yield amx.BackendInfo(name="acme", summary="a test", claims=(claim,), implementation=None)
"""


@pytest.mark.parametrize("extra", ["", "import helion"])
def test_a_declaration_that_imports_a_kernel_library_is_found(monkeypatch, tmp_path, extra):
    (tmp_path / "acme_plugin.py").write_text(PLUGIN.format(extra=extra))
    (tmp_path / "helion.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("acme_plugin", "helion"):  # set first, so that what is imported here is forgotten again
        monkeypatch.setitem(sys.modules, module, None)
        del sys.modules[module]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with host.using(Registry(("attnmux.platforms.cpu", "acme_plugin"), entry_points=False)):
        check = next(c for c in backend_checks("acme") if c.id == "declaration/import-is-light")
        if not extra:
            check.run()
            return
        with pytest.raises(CheckFailed, match="importing acme_plugin imports helion: import it where the backend is loaded"):
            check.run()
