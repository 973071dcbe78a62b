"""attnmux: one attention call for LLM inference on any accelerator.

Everything public is loaded on first use, so that ``import attnmux`` costs nothing; see ``docs/`` for the guide.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attnmux._version import __version__ as __version__

if TYPE_CHECKING:
    from attnmux.dispatch.attention import Attention as Attention
    from attnmux.dispatch.attention import Plan as Plan
    from attnmux.dispatch.batch import Batch as Batch
    from attnmux.dispatch.config import config as config
    from attnmux.dispatch.config import reload_config as reload_config
    from attnmux.dispatch.errors import AttnmuxError as AttnmuxError
    from attnmux.dispatch.errors import ConfigError as ConfigError
    from attnmux.dispatch.errors import NoBackendError as NoBackendError
    from attnmux.dispatch.errors import PluginError as PluginError
    from attnmux.dispatch.errors import UnknownDeviceError as UnknownDeviceError
    from attnmux.dispatch.host import devices as devices
    from attnmux.dispatch.host import select as select
    from attnmux.dispatch.integrations.transformers import register_transformers as register_transformers
    from attnmux.dispatch.merge import merge_states as merge_states
    from attnmux.dispatch.oracle import reference_attention as reference_attention
    from attnmux.dispatch.selection import Selection as Selection
    from attnmux.dispatch.spec import AttentionSpec as AttentionSpec
    from attnmux.dispatch.spec import Limits as Limits

_HOMES = {
    "Attention": "attention",
    "AttentionSpec": "spec",
    "AttnmuxError": "errors",
    "Batch": "batch",
    "ConfigError": "errors",
    "Limits": "spec",
    "NoBackendError": "errors",
    "Plan": "attention",
    "PluginError": "errors",
    "Selection": "selection",
    "UnknownDeviceError": "errors",
    "config": "config",
    "devices": "host",
    "merge_states": "merge",
    "reference_attention": "oracle",
    "register_transformers": "integrations.transformers",
    "reload_config": "config",
    "select": "host",
}

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'attnmux' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"attnmux.dispatch.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
