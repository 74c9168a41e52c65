"""What a scripted run did, as bars and marks on the lanes of its peers and ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang_afd.rounds.units import Unit


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Something that lasts."""

    lane: str
    kind: str  # attention, prefill attention, hang, step, window, member wait, order wait
    begin_ms: float
    end_ms: float
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happens at once."""

    lane: str
    kind: str  # intent, prefill intent, withdrawal, death
    at_ms: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One expert run of one rank."""

    rank: int
    unit: Unit
    begin_ms: float
    end_ms: float

    @property
    def peers(self) -> str:
        """Its members' names, sorted."""
        return "".join(sorted(str(member.peer) for member in self.unit.members))

    def __str__(self) -> str:
        place = f"{self.unit.layer_id}.{self.unit.micro_batch_id}"
        if not self.unit.is_prefill:
            return f"{self.peers}@{place}"
        return f"{self.peers}@{place}[{self.unit.first_row}+{self.unit.num_rows}]"


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The leading rank waits for rows of a member of its round."""

    peer: str
    layer_id: int
    micro_batch_id: int
    step: int
    begin_ms: float
    is_sound: bool  # the rows depend on nothing but replies that have left


@dataclass
class Recording:
    """Everything that one run did; times are milliseconds since its beginning."""

    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    steps_ended: dict[str, list[float]] = field(default_factory=dict)  # by peer

    def runs_of(self, rank: int = 0, *, begin_ms: float = 0.0, end_ms: float = 1e9) -> list[Run]:
        """The runs of a rank that begin within a time."""
        return [run for run in self.runs if run.rank == rank and begin_ms <= run.begin_ms < end_ms]


def told(runs: Iterable[Run]) -> str:
    """Units as text: the peers at layer.micro-batch, and the rows of a piece of a prefill."""
    return " ".join(str(run) for run in runs)
