"""Modules of a fake distribution: one good plugin, and every way to break the contract."""
