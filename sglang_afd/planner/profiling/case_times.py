"""Times of one case, over all blocks (pure)."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from sglang_afd.planner.profiling.cases import Case
from sglang_afd.planner.profiling.timeline import StepTimes


@dataclass
class CaseTimes:
    """Of one case, over all blocks."""

    case: Case
    step_context: float = 0.0  # mean tokens of a sequence while steps were timed
    stage_context: float = 0.0  # and while stages were recorded
    block_medians_us: list[float] = field(default_factory=list)
    alone_us: list[float] = field(default_factory=list)
    stages: list[StepTimes] = field(default_factory=list)

    @property
    def step_us(self) -> float:
        """From step to step; the median of the blocks."""
        return statistics.median(self.block_medians_us)

    @property
    def spread(self) -> float:
        """Half the range of the blocks, relative."""
        blocks = self.block_medians_us
        return (max(blocks) - min(blocks)) / 2 / self.step_us

    def stage_us(self, stage: str) -> float:
        """Of a whole step; the median of the recorded ones."""
        return statistics.median(times.stages_us[stage] for times in self.stages)

    def stage_spread(self, stage: str) -> float:
        """Half the interquartile range of the recorded steps, relative; 0 for an empty stage."""
        values = [times.stages_us[stage] for times in self.stages]
        middle = statistics.median(values)
        if middle <= 0 or len(values) < 2:
            return 0.0
        first, _, third = statistics.quantiles(values, n=4, method="inclusive")
        return (third - first) / 2 / middle

    @property
    def total_us(self) -> float:
        """Of all stages of a step."""
        return statistics.median(times.total_us for times in self.stages)

    @property
    def unmatched_share(self) -> float:
        """Of the stages' time; of the worst step."""
        return max(times.unmatched_share for times in self.stages)
