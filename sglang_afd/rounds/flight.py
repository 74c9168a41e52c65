"""The round in flight: who is aboard, where it is, and who is there or missing (pure)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from sglang_afd.rounds.peer_state import FIRST, PeerState, Place, Position


class Flight:
    """Peers that go through the layers together, one (layer, micro-batch) after the other."""

    def __init__(self, position: Position, now_s: float) -> None:
        self.members: dict[Hashable, PeerState] = {}
        self.position = position
        self.is_whole = position == FIRST  # began at the first layer
        self.started_s = now_s
        self.moved_s = now_s  # when the replies of its last unit left
        self.in_vain_s = 0.0  # time that ended in parking

    def board(self, state: PeerState) -> None:
        """Take a peer aboard at the present position."""
        state.place = Place.ABOARD
        self.members[state.peer] = state

    def leave(self, state: PeerState, place: Place) -> None:
        """Go on without a peer."""
        self.members.pop(state.peer, None)
        state.place = place

    def due(self) -> list[PeerState]:
        """The members whose rows the next unit takes."""
        micro_batch_id = self.position[1]
        return [state for state in self.members.values() if micro_batch_id in state.micro_batch_ids]

    def advance(self, aside: Iterable[Position], num_layers: int) -> bool:
        """Go to the next position where a member, or somebody aside, has rows; False at the end."""
        layer, micro_batch_id = self.position
        here = [part for state in self.members.values() for part in state.micro_batch_ids]
        here += [part for at, part in aside if at == layer]
        here = [part for part in here if part > micro_batch_id]
        self.position = (layer, min(here)) if here else (layer + 1, 0)
        return self.position[0] < num_layers
