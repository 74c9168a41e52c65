"""What each picture of docs/rounds.md shows: one small scene for each rule, played for real.

Some have a second panel, where the rule is left out by a planted fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from round_pictures.recording import Recording, told
from round_pictures.stage import Scene, Script, Step, play
from sglang_afd.rounds.arrival import ArrivalQueue
from sglang_afd.rounds.decode import DecodeQueue
from sglang_afd.rounds.follower import FollowerQueue
from sglang_afd.rounds.formation import Formation
from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.peer_state import FIRST, PeerState, Place, Position
from sglang_afd.rounds.rounds import Rounds
from sglang_afd.rounds.units import UnitSource


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One played scene and the part of its time that is drawn."""

    title: str
    recording: Recording
    begin_ms: float = 0.0
    end_ms: float
    has_sequence: bool = False  # units are labelled with their sequence number

    @property
    def units(self) -> str:
        """What the ranks ran in that time, as text."""
        ranks = sorted({run.rank for run in self.recording.runs})
        return "; ".join(
            told(self.recording.runs_of(rank, begin_ms=self.begin_ms, end_ms=self.end_ms))
            for rank in ranks
        )


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One file."""

    panels: Sequence[Panel]
    has_arrows: bool = False  # from each reply to the rows that it let come

    @property
    def told(self) -> str:
        """All that ran, as text; it is written into the file."""
        return " | ".join(panel.units for panel in self.panels)


def commit_at_arrival() -> Picture:
    """b has announced a decode step, and its prefill still runs."""
    decode = Step(gap_ms=1.0, attention_ms=0.8)
    prefill = Step(gap_ms=1.0, attention_ms=4.0, rows=300, is_prefill=True)
    scene = Scene(
        scripts={
            "a": Script(steps=[decode] * 6),
            "b": Script(steps=[decode, prefill, decode]),
        },
        layers=3,
        make_sources=_announced("ab"),
        expert_ms=lambda unit: 1.2,
        until_ms=42.0,
    )
    planted = replace(scene, make_sources=_commits_from_intents)
    return Picture(
        panels=[
            _panel("a peer is in a round once its rows are here", scene),
            _panel("without the rule: a round with whoever announced a step", planted),
        ]
    )


def one_round() -> Picture:
    """c is slow and d comes late."""
    steps = [Step(attention_ms=ms) for ms in (1.0, 1.0, 1.0)]
    scene = Scene(
        scripts={
            "a": Script(steps=steps[:2]),
            "b": Script(steps=[replace(step, gap_ms=1.2) for step in steps[:2]]),
            "c": Script(steps=[replace(step, attention_ms=1.8) for step in steps[:2]]),
            "d": Script(steps=[replace(steps[0], gap_ms=5.0)]),
        },
        layers=4,
        make_sources=_announced("abc"),
        expert_ms=lambda unit: 1.0,
        until_ms=27.0,
    )
    return Picture(panels=[_panel("", scene)])


def window() -> Picture:
    """c sleeps after its eighth step, without a word."""
    normal = {name: Step(gap_ms=gap_ms) for name, gap_ms in zip("abc", (2, 2.5, 3), strict=True)}
    scripts = {name: Script(steps=[step] * 14) for name, step in normal.items()}
    sleeps = [normal["c"]] * 9 + [replace(normal["c"], gap_ms=19.0), normal["c"]]
    scripts["c"] = Script(steps=sleeps)
    scene = Scene(
        scripts=scripts,
        layers=3,
        make_sources=lambda layer_ids: [Rounds(layer_ids)],
        expert_ms=lambda unit: 1.0,
        until_ms=140.0,
    )
    recording = play(scene)
    begin_ms = recording.steps_ended["c"][7] - 1.0
    return Picture(
        panels=[Panel(title="", recording=recording, begin_ms=begin_ms, end_ms=begin_ms + 46.0)]
    )


def window_clock() -> Picture:
    """Two halves of the peers that begin out of phase."""
    step = Step(gap_ms=2.0)
    late = replace(step, gap_ms=10.0)
    scripts = {name: Script(steps=[step] * 6) for name in "ab"}
    scripts |= {name: Script(steps=[late, *[step] * 5]) for name in "cd"}
    options = RoundOptions(window_cap_s=0.004, window_cap_of_round=0.0)
    scene = Scene(
        scripts=scripts,
        layers=4,
        make_sources=lambda layer_ids: [_ExpectsFirst(layer_ids, "ab", options)],
        expert_ms=lambda unit: 2.0,
        until_ms=70.0,
    )

    def from_first_arrival(layer_ids: Sequence[int]) -> list[UnitSource]:
        rounds = _ExpectsFirst(layer_ids, "ab", options)
        rounds._decode._formation.__class__ = _FromFirstArrival
        return [rounds]

    planted = replace(scene, make_sources=from_first_arrival)
    return Picture(
        panels=[
            _panel("the clock begins when the round before ends", scene),
            _panel("without the rule: it begins at the first arrival", planted),
        ]
    )


def parking() -> Picture:
    """c hangs in its fourth step."""
    step = Step(gap_ms=2.0)
    hangs = [*[step] * 3, replace(step, hangs_ms={2: 30.0}), *[step] * 3]
    scene = Scene(
        scripts={
            "a": Script(steps=[step] * 9),
            "b": Script(steps=[step] * 9),
            "c": Script(steps=hangs),
        },
        layers=4,
        make_sources=_announced("abc"),
        expert_ms=lambda unit: 1.0,
        until_ms=100.0,
    )
    recording = play(scene)
    begin_ms = recording.steps_ended["c"][2]
    return Picture(
        panels=[Panel(title="", recording=recording, begin_ms=begin_ms, end_ms=begin_ms + 54.0)]
    )


def prefill() -> Picture:
    """p prefills while a and b keep the rank busy, and again when they have ended."""
    decode = Step(attention_ms=0.4, parts=2)
    prompt = Step(attention_ms=1.5, rows=600, is_prefill=True)
    scene = Scene(
        scripts={
            "a": Script(steps=[decode] * 3),
            "b": Script(steps=[decode] * 3),
            "p": Script(steps=[replace(prompt, gap_ms=3.0), prompt]),
        },
        layers=4,
        make_sources=_announced("ab"),
        expert_ms=lambda unit: 0.6 + 0.004 * unit.num_rows,
        until_ms=47.0,
    )
    return Picture(panels=[_panel("", scene)])


def micro_batches() -> Picture:
    """a and c have two micro-batches, b has one."""
    step = Step(parts=2, attention_ms=1.0)
    scene = Scene(
        scripts={
            "a": Script(steps=[step] * 2),
            "b": Script(steps=[Step(gap_ms=0.9, attention_ms=1.6)] * 2),
            "c": Script(steps=[replace(step, gap_ms=1.1)] * 2),
        },
        layers=4,
        make_sources=_announced("abc"),
        expert_ms=lambda unit: 0.8,
        until_ms=25.0,
    )
    return Picture(panels=[_panel("", scene)])


def ranks() -> Picture:
    """b's first rows reach rank 1 late."""
    step = Step(gap_ms=1.0)
    scene = Scene(
        scripts={
            "a": Script(steps=[step] * 2),
            "b": Script(steps=[step] * 2, delays_ms={1: 2.0}),
        },
        layers=3,
        make_sources=lambda layer_ids: [_ExpectsFirst(layer_ids, "ab"), FollowerQueue()],
        expert_ms=lambda unit: 1.2,
        until_ms=20.0,
    )
    alone = replace(
        scene, make_sources=lambda layer_ids: [_ExpectsFirst(layer_ids, "ab"), Rounds(layer_ids)]
    )
    return Picture(
        panels=[
            replace(_panel("rank 1 runs what rank 0 says", scene), has_sequence=True),
            _panel("without the rule: each rank forms rounds of its own", alone),
        ]
    )


def invariant() -> Picture:
    """Two peers with two micro-batches each; b is slow."""
    scene = Scene(
        scripts={
            "a": Script(steps=[Step(parts=2, attention_ms=1.0)]),
            "b": Script(steps=[Step(parts=2, attention_ms=1.6)]),
        },
        layers=3,
        make_sources=_announced("ab"),
        expert_ms=lambda unit: 0.7,
        until_ms=12.5,
    )
    return Picture(panels=[_panel("", scene)], has_arrows=True)


def death() -> Picture:
    """b dies at its second layer, which the MLP rank learns 4 ms later."""
    step = Step(gap_ms=1.0)
    scene = Scene(
        scripts={
            "a": Script(steps=[step] * 2),
            "b": Script(steps=[step] * 2, dies_ms=5.5, noticed_after_ms=4.0),
            "c": Script(steps=[step] * 2),
        },
        layers=4,
        make_sources=_announced("abc"),
        expert_ms=lambda unit: 1.0,
        until_ms=24.0,
    )
    return Picture(panels=[_panel("", scene)])


def first_come() -> Picture:
    """An expert run that takes as long for one peer as for four, and four times attention."""
    scripts = {
        name: Script(steps=[Step(gap_ms=1.0 + number, attention_ms=1.0), *[Step()] * 9])
        for number, name in enumerate("abcd")
    }
    scene = Scene(
        scripts=scripts,
        layers=3,
        make_sources=_announced("abcd"),
        expert_ms=lambda unit: 4.0,
        until_ms=100.0,
    )
    alone = replace(scene, make_sources=lambda layer_ids: [ArrivalQueue()])
    panels = [
        _panel("rounds", scene),
        _panel("first come, first served (SGLANG_AFD_ROUNDS=off)", alone),
    ]
    return Picture(
        panels=[
            replace(panel, title=f"{panel.title}: {_num_steps(panel.recording)} steps have ended")
            for panel in panels
        ]
    )


PICTURES: dict[str, Callable[[], Picture]] = {
    "first-come": first_come,
    "commit-at-arrival": commit_at_arrival,
    "one-round": one_round,
    "window": window,
    "window-clock": window_clock,
    "parking": parking,
    "prefill": prefill,
    "micro-batches": micro_batches,
    "ranks": ranks,
    "invariant": invariant,
    "death": death,
}


class _CommitsFromIntents(DecodeQueue):
    """Takes along whoever announced a step, though no row of it is here."""

    def _who_starts(self, position: Position) -> list[PeerState]:
        others = [
            state
            for state in self._peers.values()
            if position == FIRST and state.place is Place.AWAY and state.announced is not None
        ]
        for state in others:
            state.micro_batch_ids = {0}
        return super()._who_starts(position) + others


class _FromFirstArrival(Formation):
    """A window whose clock does not know when the last round ended."""

    @property
    def ended_s(self) -> float:  # type: ignore[override]
        return -math.inf

    @ended_s.setter
    def ended_s(self, value: float) -> None:
        pass


def _commits_from_intents(layer_ids: Sequence[int]) -> list[UnitSource]:
    rounds = _ExpectsFirst(layer_ids, "ab")
    rounds._decode.__class__ = _CommitsFromIntents
    return [rounds]


def _announced(peers: str) -> Callable[[Sequence[int]], list[UnitSource]]:
    def make(layer_ids: Sequence[int]) -> list[UnitSource]:
        return [_ExpectsFirst(layer_ids, peers)]

    return make


class _ExpectsFirst(Rounds):
    """Expects `peers` from the beginning, as it would after a step of theirs."""

    def __init__(
        self, layer_ids: Sequence[int], peers: str, options: RoundOptions | None = None
    ) -> None:
        super().__init__(layer_ids, options)
        self._first = set(peers)

    def peer_attached(self, peer: Hashable, epoch: int, now_s: float) -> None:
        super().peer_attached(peer, epoch, now_s)
        if peer in self._first:
            self._peers[peer].has_decoded = True


def _panel(title: str, scene: Scene) -> Panel:
    return Panel(title=title, recording=play(scene), end_ms=scene.until_ms)


def _num_steps(recording: Recording) -> int:
    return sum(len(ended) for ended in recording.steps_ended.values())
