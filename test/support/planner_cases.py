"""Scenarios and calls that the tests of the planner's commands share."""

from __future__ import annotations

import contextlib
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

from sglang_afd.planner.__main__ import main
from sglang_afd.planner.deployment import Workload
from sglang_afd.planner.fit import fit
from sglang_afd.planner.gpu import GPUS, Gpu
from sglang_afd.planner.known_models import known_shape
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.site import Site

COLLECTION = Path(__file__).parents[2] / "benchmark/planner/fastafd_gb200_qwen3_235b.json"
PRIORS = fit([])  # what is known without any measurement


def site(
    model: str = "Qwen3-30B-A3B", gpu: Gpu = GPUS["H200"], context: float = 4096, **workload: Any
) -> Site:
    """A small one, unless told otherwise."""
    scenario = Scenario(
        shape=known_shape(model),
        gpu=gpu,
        workload=Workload(context_tokens=context, **workload),
    )
    return Site(scenario=scenario)


@cache
def _output(argv: tuple[str, ...]) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main(list(argv)) == 0
    return shown.getvalue()


def said(*argv: object) -> str:
    """What a command prints; it has to succeed. The same call is made once."""
    return _output(tuple(map(str, argv)))


def told(*argv: object) -> Any:
    """The JSON that a command prints."""
    return json.loads(said(*argv, "--json"))
