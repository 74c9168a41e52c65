"""What the servers counted during one measurement, and whether it adds up.

Three parties count apart from each other: the planted code on the attention side, the planted code
on the expert side, and the product's own /metrics. Where all agree, no delay was skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlap.delays import Word
from overlap.fleet import Group, Server


@dataclass(frozen=True, kw_only=True)
class Load:
    """What runs on each attention server, and how long each part of a layer is made to take."""

    num_layers: int
    batch: int  # requests of each attention server
    num_tokens: int  # of each request
    micro_batches: int  # into which each of these servers cuts a step
    attn_ms: float = 0.0  # for each exchange
    expert_ms: float = 0.0  # for each expert run
    attn_row_ms: float = 0.0  # for each row of an exchange
    expert_row_ms: float = 0.0  # for each row of an expert run


@dataclass(frozen=True)
class Counts:
    """One entry for each server."""

    attn: list[dict[Word, int]]
    experts: list[dict[Word, int]]
    mlp: list[dict[str, float]]

    @classmethod
    def read(cls, group: Group, attn: Sequence[Server]) -> Counts:
        """Since the servers started."""
        return cls(
            [server.delays.read() for server in attn],
            [server.delays.read() for server in group.mlp],
            [server.counters() for server in group.mlp],
        )

    def since(self, before: Counts) -> Counts:
        """The difference."""
        return Counts(
            _minus(self.attn, before.attn),
            _minus(self.experts, before.experts),
            _minus(self.mlp, before.mlp),
        )

    def total(self, word: Word) -> int:
        """Over the attention servers."""
        return sum(counts[word] for counts in self.attn)

    def summary(self) -> dict[str, Any]:
        """What the report shows."""
        exchanges, runs = self.total(Word.CALLS), self.experts[0][Word.CALLS]
        return {
            "decode_steps": [counts[Word.DECODE_STEPS] for counts in self.attn],
            "exchanges": exchanges,
            "expert_runs": sum(counts[Word.CALLS] for counts in self.experts),
            "rows": sum(counts[Word.ROWS] for counts in self.experts),
            "peers_per_run": round(exchanges / runs, 2) if runs else 0.0,
            "attn_slept_s": round(self.total(Word.SLEPT_NS) / 1e9, 3),
            "experts_slept_s": round(
                sum(counts[Word.SLEPT_NS] for counts in self.experts) / 1e9, 3
            ),
        }

    def faults(self, load: Load) -> list[str]:
        """What does not add up, in words."""
        checks: list[tuple[str, float, float]] = []
        for rank, (planted, metrics) in enumerate(zip(self.experts, self.mlp, strict=True)):
            name = f"MLP rank {rank}: "
            asked_ms = load.expert_ms * planted[Word.CALLS]
            asked_ms += load.expert_row_ms * planted[Word.ROWS]
            checks += [
                (name + "delayed runs", planted[Word.CALLS], metrics["expert_runs_total"]),
                (name + "delayed rows", planted[Word.ROWS], metrics["rows_total"]),
                (name + "rows received", metrics["rows_total"], self.total(Word.ROWS)),
                (name + "decode rows", metrics["decode_rows_total"], self.total(Word.DECODE_ROWS)),
                (name + "exchanges", metrics["exchanges_total"], self.total(Word.CALLS)),
                (name + "ms of delay", planted[Word.ASKED_NS] / 1e6, asked_ms),
            ]
        for index, counts in enumerate(self.attn):
            name = f"attention server {index}: "
            asked_ms = load.attn_ms * counts[Word.CALLS] + load.attn_row_ms * counts[Word.ROWS]
            per_step = load.num_layers * load.micro_batches
            checks += [
                (name + "ms of delay", counts[Word.ASKED_NS] / 1e6, asked_ms),
                (
                    name + "decode exchanges",
                    counts[Word.DECODE_CALLS],
                    counts[Word.DECODE_STEPS] * per_step,
                ),
                (
                    name + "decode rows",
                    counts[Word.DECODE_ROWS],
                    counts[Word.DECODE_STEPS] * load.num_layers * load.batch,
                ),
            ]
        faults = [
            f"{what}: {got:g}, expected {wanted:g}"
            for what, got, wanted in checks
            if abs(got - wanted) > 1e-3
        ]
        return faults + self._short_sleeps() + self._missing_steps(load)

    def _short_sleeps(self) -> list[str]:
        return [
            f"slept {counts[Word.SLEPT_NS]} ns of {counts[Word.ASKED_NS]}"
            for counts in [*self.attn, *self.experts]
            if counts[Word.SLEPT_NS] < counts[Word.ASKED_NS]
        ]

    def _missing_steps(self, load: Load) -> list[str]:
        """Each token but the first is a decode step; the overlap scheduler may run one more."""
        wanted = load.num_tokens - 1
        return [
            f"attention server {index}: {counts[Word.DECODE_STEPS]} decode steps for {wanted}"
            for index, counts in enumerate(self.attn)
            if counts[Word.DECODE_STEPS] not in (wanted, wanted + 1)
        ]


def _minus(after: list[dict[Any, Any]], before: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    return [
        {key: value - old[key] for key, value in new.items()}
        for new, old in zip(after, before, strict=True)
    ]
