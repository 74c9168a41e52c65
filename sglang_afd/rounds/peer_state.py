"""What is known of one attention server: where its step is, and whether to wait for it (pure)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from sglang_afd.rounds.units import Intent, Member

Position = tuple[int, int]  # index of the layer, micro-batch: the order in which rows leave a peer
FIRST: Position = (0, 0)

MAX_INTENTS = 4  # a scheduler is one or two steps ahead; more are of a peer that errs


class Place(Enum):
    """Where a peer's decode step is."""

    AWAY = "between two steps"
    GATHERED = "at the first layer, in no round yet"
    ABOARD = "in the round"
    ASIDE = "in the middle of a step, in no round: parked, or not in the order of layers"


@dataclass(slots=True)
class Waiting:
    """A decode exchange that is here and has not been run."""

    member: Member
    position: Position
    arrived_s: float


@dataclass(slots=True)
class PeerState:
    """One attached peer."""

    peer: Hashable
    place: Place = Place.AWAY
    slots: dict[int, Waiting] = field(default_factory=dict)  # by micro-batch
    num_micro_batches: int = 1
    # The micro-batches that go on in this step as far as is known. A peer that attached in the
    # middle of its step may have had its last reply for some already.
    micro_batch_ids: set[int] = field(default_factory=set)
    step: int = -1  # of the last exchange
    replied_s: float | None = None  # when its last reply left
    intents: list[Intent] = field(default_factory=list)  # of steps none of whose rows have come
    has_decoded: bool = False  # its last step was a decode step, and has ended
    is_prefilling: bool = False
    quiet_from: int | None = None  # the first step that it said is not to come
    was_idle: bool = False  # since its last step: what passed is no host gap
    was_missed: bool = False  # waited for in vain; not again until it shows up

    @property
    def is_expected(self) -> bool:
        """Whether its next decode step is likely to come soon.

        A peer that says nothing is expected after each decode step: an intent may be lost, or come
        with the rows themselves where the scheduler does not run ahead.
        """
        if self.place is not Place.AWAY or self.was_missed or self.is_prefilling:
            return False
        if self.announced is not None:
            return not self.announced.is_prefill
        return self.has_decoded and (self.quiet_from is None or self.step + 1 < self.quiet_from)

    @property
    def announced(self) -> Intent | None:
        """Of its next step. Under an overlap scheduler the one after it may be known, too."""
        return self.intents[0] if self.intents else None

    @property
    def is_decoding(self) -> bool:
        """Whether decode rows of this peer are under way or will soon be."""
        return self.place is not Place.AWAY or self.is_expected

    def is_at(self, position: Position) -> bool:
        """Whether its rows of `position` are here."""
        waiting = self.slots.get(position[1])
        return waiting is not None and waiting.position == position

    @property
    def stands_at(self) -> Position | None:
        """The earliest position of which rows are here; taken later they would be out of order."""
        return min((waiting.position for waiting in self.slots.values()), default=None)

    def announce(self, intent: Intent) -> None:
        """Note a step to come; one whose rows are here already says nothing new."""
        if intent.step > self.step:
            others = [other for other in self.intents if other.step != intent.step]
            by_step = sorted([*others, intent], key=lambda other: other.step)
            self.intents = by_step[-MAX_INTENTS:]
            if self.quiet_from is not None and intent.step >= self.quiet_from:
                self.quiet_from = None

    def withdraw(self, first_step: int) -> None:
        """No step is to come from `first_step` on."""
        self.intents = [intent for intent in self.intents if intent.step < first_step]
        self.quiet_from = first_step
        self.was_idle = not self.intents

    def prefills(self, step: int) -> None:
        """Rows of a prefill are here."""
        self.shows_up(step)
        self.is_prefilling, self.has_decoded, self.was_idle = True, False, False

    def shows_up(self, step: int) -> None:
        """Rows of `step` are here."""
        if step != self.step:
            self.has_decoded = False
            if self.quiet_from is not None and step >= self.quiet_from:
                self.quiet_from = None
        self.step = step
        self.was_missed = False
        self.intents = [intent for intent in self.intents if intent.step > step]
