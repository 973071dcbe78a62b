"""Everything a plugin needs: ``import attnmux.plugin as amx``. ``docs/plugins.md`` writes one in ten lines."""

from attnmux.dispatch.backend import Backend, LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.claims import BackendInfo, Claim, Composition, TestedOn
from attnmux.dispatch.constraints import ANY, OFF, ON, YES_OR_NO, AnyOf, Constraint, Not, OneOf, Range, SameAs
from attnmux.dispatch.device import Device, DeviceSet
from attnmux.dispatch.health import Finding, HealthCheck
from attnmux.dispatch.hookspecs import CONTRACT, hookimpl
from attnmux.dispatch.platform import ALWAYS, Arch, Insertion, Order, Platform, Probed, When, when
from attnmux.dispatch.query import Query
from attnmux.dispatch.reasons import Reason
from attnmux.dispatch.requirements import Package, Program, Requirement, Setting
from attnmux.dispatch.spec import AttentionSpec, Limits

__all__ = [
    "ALWAYS",
    "ANY",
    "CONTRACT",
    "OFF",
    "ON",
    "YES_OR_NO",
    "AnyOf",
    "Arch",
    "AttentionSpec",
    "Backend",
    "BackendInfo",
    "Batch",
    "Claim",
    "Composition",
    "Constraint",
    "Device",
    "DeviceSet",
    "Finding",
    "HealthCheck",
    "Insertion",
    "LayerArgs",
    "Limits",
    "Not",
    "OneOf",
    "Order",
    "Package",
    "Platform",
    "Probed",
    "Program",
    "Query",
    "Range",
    "Reason",
    "Requirement",
    "SameAs",
    "Setting",
    "TestedOn",
    "When",
    "hookimpl",
    "when",
]
