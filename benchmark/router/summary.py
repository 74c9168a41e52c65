"""From what was measured to the numbers of the line (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from router.load import Result


@dataclass
class Series:
    """All runs of one case against one target, a block each."""

    results: list[Result] = field(default_factory=list)
    target_cpu_s: list[float] = field(default_factory=list)
    server_cpu_s: list[float] = field(default_factory=list)

    def add(self, result: Result, target_cpu_s: float, server_cpu_s: float) -> None:
        """Keep one run with the CPU time that the target and the fake server used in it."""
        self.results.append(result)
        self.target_cpu_s.append(target_cpu_s)
        self.server_cpu_s.append(server_cpu_s)

    @property
    def first_ms(self) -> list[float]:
        return [1e3 * time_s for result in self.results for time_s in result.first_s]

    def cpu_us(self, counted: str) -> float:
        """Median over blocks of the target's CPU time for each `num_chunks` or `num_requests`."""
        return statistics.median(
            1e6 * cpu_s / max(1, getattr(result, counted))
            for result, cpu_s in zip(self.results, self.target_cpu_s, strict=True)
        )

    def describe(self, direct: Series | None) -> dict[str, Any]:
        """What a reader needs to judge the numbers; `direct` is the same case without a router."""
        firsts = self.first_ms
        window_s = sum(result.window_s for result in self.results)
        told: dict[str, Any] = {
            "first_p50_ms": round(quantile(firsts, 0.5), 2),
            "first_p99_ms": round(quantile(firsts, 0.99), 2),
            "samples": len(firsts),
            "chunks_per_s": round(sum(r.num_chunks for r in self.results) / window_s),
            "requests_per_s": round(sum(r.num_requests for r in self.results) / window_s),
            "lost": sum(result.num_lost for result in self.results),
            # Of one core each; the load generator and the fake server have one thread.
            "target_cores": round(sum(self.target_cpu_s) / window_s, 2),
            "server_cores": round(sum(self.server_cpu_s) / window_s, 2),
            "client_cores": round(sum(r.client_cpu_s for r in self.results) / window_s, 2),
        }
        if direct is not None:
            told["added_p50_ms"] = added_ms(self, direct, 0.5)
            told["added_p99_ms"] = added_ms(self, direct, 0.99)
        return told


def added_ms(series: Series, direct: Series, fraction: float) -> float:
    """By how much later than without a router the first event came."""
    both = (quantile(each.first_ms, fraction) for each in (series, direct))
    return round(next(both) - next(both), 2)


def quantile(values: Sequence[float], fraction: float) -> float:
    """0 for no values, so that a failed run still has its line."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0
