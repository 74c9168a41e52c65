"""Cuts a recording of kernels into steps, and each step's time into stages (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_afd.errors import ConfigError
from sglang_afd.planner.profiling import kernels
from sglang_afd.planner.profiling.kernels import Kernel

# Between kernels of one graph there is about 1 us; a longer gap than this is the host's.
_LONGEST_GAP_NS = 20_000


UNMATCHED = "unmatched"


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Of one step, in us."""

    stages_us: dict[str, float]
    unmatched_us: float = 0.0
    by_kernel_us: dict[tuple[str, str], float]  # of stage and name

    @property
    def total_us(self) -> float:
        """Without the gaps that the host left."""
        return sum(self.stages_us.values()) + self.unmatched_us

    @property
    def unmatched_share(self) -> float:
        """Of the total."""
        return self.unmatched_us / self.total_us if self.total_us else 1.0


def split_steps(recorded: Sequence[Kernel], num_steps: int) -> list[list[Kernel]]:
    """Steps between which the device was left idle on purpose.

    Raises: ConfigError, when the pauses do not stand out.
    """
    ordered = sorted(recorded, key=lambda kernel: kernel.start_ns)
    if len(ordered) < num_steps:
        raise ConfigError(
            f"profile: the profiler recorded {len(ordered)} kernels in {num_steps} steps; does "
            "this machine let programs use CUPTI?"
        )
    gaps = _gaps_before(ordered)
    longest = sorted(range(len(gaps)), key=lambda index: -gaps[index])
    cuts = sorted(longest[: num_steps - 1])
    shortest_pause = min((gaps[index] for index in cuts), default=0)
    other = gaps[longest[num_steps - 1]] if len(longest) >= num_steps else 0
    if cuts and shortest_pause < 1.3 * other:
        raise ConfigError(
            f"profile: steps cannot be told apart: a pause of {shortest_pause / 1000:.0f} us and a "
            f"gap of {other / 1000:.0f} us inside a step; is something else running here?"
        )
    edges = [0, *cuts, len(ordered)]
    return [ordered[begin:end] for begin, end in zip(edges, edges[1:], strict=False)]


def times_of(step: Sequence[Kernel]) -> StepTimes:
    """A kernel is charged from the end of all before it to its own end.

    So stages add up to the time from the first kernel to the last, but for gaps of the host.
    """
    names = [kernel.name for kernel in step]
    found = kernels.stages_of(names)
    begin, end = kernels.layers_between(names, found)
    totals = dict.fromkeys((*kernels.STAGES, UNMATCHED), 0.0)
    by_kernel: dict[tuple[str, str], float] = {}
    done_ns = step[0].start_ns if step else 0
    for index, (kernel, stage) in enumerate(zip(step, found, strict=True)):
        charged_us = _charged_ns(kernel, done_ns) / 1000
        done_ns = max(done_ns, kernel.end_ns)
        where = UNMATCHED if stage is None else stage if begin <= index < end else kernels.OUTSIDE
        totals[where] += charged_us
        by_kernel[where, kernel.name] = by_kernel.get((where, kernel.name), 0.0) + charged_us
    unmatched_us = totals.pop(UNMATCHED)
    return StepTimes(stages_us=totals, unmatched_us=unmatched_us, by_kernel_us=by_kernel)


def _charged_ns(kernel: Kernel, done_ns: int) -> int:
    gap = kernel.start_ns - done_ns
    own = kernel.end_ns - max(kernel.start_ns, done_ns)
    return max(own, 0) + (gap if 0 < gap <= _LONGEST_GAP_NS else 0)


def _gaps_before(ordered: Sequence[Kernel]) -> list[int]:
    """Idle time before each kernel; 0 before the first."""
    gaps, done_ns = [], ordered[0].start_ns
    for kernel in ordered:
        gaps.append(kernel.start_ns - done_ns)
        done_ns = max(done_ns, kernel.end_ns)
    return gaps
