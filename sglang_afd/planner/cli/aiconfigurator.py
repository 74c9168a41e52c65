"""Kernel times from the tables of aiconfigurator-core, an optional extra."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from sglang_afd.planner.fit import Observation
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.shape import ModelShape


class NoTables(Exception):
    """Why there is nothing to read."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What passed the gate."""

    version: str
    observations: tuple[Observation, ...]
    notes: tuple[str, ...]


def read_tables(shape: ModelShape, gpu: Gpu) -> Tables:
    """Times of this model's kernels on this GPU.

    Raises: NoTables.
    """
    if importlib.util.find_spec("aiconfigurator_core") is None:
        raise NoTables("it is not installed; pip install 'sglang-afd[aiconfigurator]'")
    raise NoTables(f"it has no tables for {shape.name} on {gpu.name}")
