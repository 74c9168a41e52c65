"""What a report shows, as numbers: sweeps over the ratio, factors, one step's timeline."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_afd.planner.answer import Answered
from sglang_afd.planner.deployment import Deployment, Mode
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.search import Space, best_batch
from sglang_afd.planner.simulator.simulation import Options, simulate
from sglang_afd.planner.simulator.timeline import Span
from sglang_afd.planner.site import Site
from sglang_afd.planner.speedup import SpeedUp, speed_up

_LAYERS_OF_A_TIMELINE = 3
_POINTS_OF_A_LINE = 40


@dataclass(frozen=True, kw_only=True)
class RatioLine:
    """One width of expert parallelism, over attention GPUs."""

    mlp_gpus: int
    points: tuple[Prediction, ...]


@dataclass(frozen=True, kw_only=True)
class Busy:
    """A stage that works on one micro-batch of one layer."""

    is_attention: bool
    micro_batch: int
    layer: int
    start_us: float
    stop_us: float


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything that is drawn."""

    site: Site
    answered: Answered
    result: SpeedUp
    lines: tuple[RatioLine, ...]
    timeline: tuple[Busy, ...]


def contents(site: Site, space: Space, answered: Answered) -> Contents | None:
    """None when one side has no deployment: there is nothing to compare then."""
    base, best = answered.found.colocated.best, answered.found.disaggregated.best
    if base is None or best is None:
        return None
    return Contents(
        site=site,
        answered=answered,
        result=speed_up(site.scenario, base.deployment, best.deployment),
        lines=_lines(site, space, best.deployment),
        timeline=timeline(site.scenario, best.deployment),
    )


def _lines(site: Site, space: Space, best: Deployment) -> tuple[RatioLine, ...]:
    """Of the best number of MLP GPUs, and of its neighbours."""
    widths = space.widths(site.scenario.shape)
    index = widths.index(best.mlp_gpus)
    near = widths[max(index - 1, 0) : index + 2]
    lines = [_line(site, space, replace(best, mlp_gpus=w, expert_parallel=w)) for w in near]
    return tuple(line for line in lines if line.points)


def _line(site: Site, space: Space, like: Deployment) -> RatioLine:
    most = max(space.max_gpus - like.mlp_gpus, 0)
    step = max(1, most // _POINTS_OF_A_LINE)
    counts = sorted({*range(1, most + 1, step), like.attn_gpus} & set(range(1, most + 1)))
    points = [best_batch(site, replace(like, attn_gpus=count)) for count in counts]
    return RatioLine(
        mlp_gpus=like.mlp_gpus, points=tuple(point for point in points if point is not None)
    )


def timeline(scenario: Scenario, deployment: Deployment) -> tuple[Busy, ...]:
    """The first layers of a step of one attention server and one MLP rank, as simulated."""
    assert deployment.mode is not Mode.COLOCATED, "a colocated step has one stage"
    options = Options(num_steps=1, warm_steps=1, span=Span(first_step=1))
    shown = {"attn 0": True, "mlp 0": False}
    intervals = [
        item
        for item in simulate(scenario, deployment, options=options).intervals
        if item.server in shown and item.layer < _LAYERS_OF_A_TIMELINE
    ]
    began_us = min(item.start_us for item in intervals)
    return tuple(
        Busy(
            is_attention=shown[item.server],
            micro_batch=item.micro_batch,
            layer=item.layer,
            start_us=item.start_us - began_us,
            stop_us=item.end_us - began_us,
        )
        for item in intervals
    )
