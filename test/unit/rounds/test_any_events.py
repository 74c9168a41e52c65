"""Whatever comes in whatever order: nothing crashes, and no rows are lost or run twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_afd.rounds.follower import FollowerQueue
from sglang_afd.rounds.orders import order_of
from sglang_afd.rounds.rounds import Rounds
from sglang_afd.rounds.units import Intent, Member, Unit, UnitSource

PEERS = "abc"
LAYERS = (2, 3, 5)

members = st.builds(
    Member,
    peer=st.sampled_from((*PEERS, "stranger")),
    micro_batch_id=st.integers(0, 3),
    step=st.integers(0, 4),
    layer_id=st.sampled_from(LAYERS),
    num_rows=st.sampled_from((0, 1, 900)),
    num_micro_batches=st.integers(1, 4),
    is_prefill=st.booleans(),
)
intents = st.builds(
    Intent,
    peer=st.sampled_from((*PEERS, "stranger")),
    step=st.integers(0, 6),
    num_rows=st.just(1),
    is_prefill=st.booleans(),
)
events = (
    members
    | intents
    | st.tuples(st.sampled_from(("attached", "gone", "withdrawn")), st.sampled_from(PEERS))
    | st.floats(0.0, 0.2)  # time passes
    | st.just("run")
)


class Books:
    """What is here, and how often each was run."""

    def __init__(self, source: UnitSource) -> None:
        self.source, self.now = source, 0.0
        self.epochs: dict[Hashable, int] = {}  # of those attached
        self.num_attached = 0
        self.slots: dict[tuple[Hashable, int], Member] = {}  # decode: the last of a slot stands
        self.others: Counter[Member] = Counter()  # prefill

    def happens(self, event: object) -> None:
        source = self.source
        match event:
            case Member():
                self._arrives(event)
            case Intent():
                source.announced(event, self.now)
            case ("attached", str(peer)):
                self._forget(peer)
                self.num_attached += 1
                self.epochs[peer] = self.num_attached
                source.peer_attached(peer, self.num_attached, self.now)
            case ("gone", str(peer)):
                self._forget(peer)
                self.epochs.pop(peer, None)
                source.peer_gone(peer, self.now)
            case ("withdrawn", str(peer)):
                source.withdrawn(peer, self.now)
            case float():
                self.now += event
            case _:
                self.run()

    def _arrives(self, member: Member) -> None:
        self.source.arrived(member, self.now)
        if member.peer not in self.epochs:
            return
        if member.is_prefill:
            self.others[member] = 1
        else:
            self.slots[member.peer, member.micro_batch_id] = member

    def _forget(self, peer: Hashable) -> None:
        self.slots = {slot: one for slot, one in self.slots.items() if slot[0] != peer}
        self.others = Counter({one: n for one, n in self.others.items() if one.peer != peer})

    def run(self) -> Unit | None:
        """At most one unit; each of its members must be here."""
        unit = self.source.next_unit(self.now)
        if unit is None:
            return None
        for member in unit.members:
            slot = (member.peer, member.micro_batch_id)
            if not unit.is_prefill and self.slots.get(slot) == member:
                del self.slots[slot]
            else:
                assert self.others[member] > 0, f"{member} is not here"
                self.others[member] -= unit.is_last_piece
        self.now += 0.001
        self.source.finished(unit, self.now)
        return unit

    def drain(self) -> None:
        """Let all time pass that the source asks for."""
        for _ in range(1000):
            if self.run() is None:
                wake = self.source.wake_at_s(self.now)
                if wake is None:
                    return
                assert wake > self.now
                self.now = wake
        raise AssertionError("does not come to rest")


@settings(max_examples=900, deadline=None, derandomize=True)
@given(st.lists(events, max_size=60))
def test_the_leader_runs_all_that_is_here_whatever_comes(script: list[object]) -> None:
    books = Books(Rounds(LAYERS))
    for peer in PEERS:
        books.happens(("attached", peer))
    for event in script:
        books.happens(event)

    books.drain()

    assert books.slots == {}
    assert +books.others == Counter()


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(events, max_size=60), st.randoms(use_true_random=False))
def test_a_follower_runs_all_that_the_leader_ran(script: list[object], random: object) -> None:
    leader, follower = Books(Rounds(LAYERS)), FollowerQueue()
    behind = Books(follower)
    for peer in PEERS:
        leader.happens(("attached", peer))
        behind.happens(("attached", peer))
    ran: list[int] = []

    def lead() -> bool:
        unit = leader.run()
        if unit is not None and not unit.is_prefill:
            follower.ordered(order_of(unit, leader.epochs))
            ran.append(unit.sequence)
        return unit is not None

    sent: set[Member] = set()
    for event in script:
        if isinstance(event, Member):
            if event in sent:  # a repeated message would be two exchanges to the one that is ahead
                continue
            sent.add(event)
        if event == "run":
            lead()
        else:
            leader.happens(event)
            behind.happens(event)
        if random.random() < 0.5:  # type: ignore[attr-defined]
            behind.run()
    while lead() or leader.source.wake_at_s(leader.now) is not None:
        leader.now = max(leader.now, leader.source.wake_at_s(leader.now) or 0.0)
    behind.drain()

    assert follower.awaited == [], f"the follower waits, though the leader ran {ran}"
