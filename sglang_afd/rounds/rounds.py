"""Rounds: peers whose decode steps go through the layers together, so that weights are read once.

docs/rounds.md explains the rules. In short: a peer is in a round only once its rows of the first
layer are here; one round is in flight; its members are waited for at every layer; a member that
holds up the others is parked and boards a later round where it stands; prefill goes beside.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from sglang_afd.rounds.counters import RoundCounters
from sglang_afd.rounds.decode import DecodeQueue
from sglang_afd.rounds.options import RoundOptions
from sglang_afd.rounds.peer_state import PeerState, Place
from sglang_afd.rounds.prefill import PrefillQueue
from sglang_afd.rounds.units import Intent, Member, Unit


class Rounds:
    """The `UnitSource` of the rank that leads.

    A unit is handed out when the rows of all its members are here, so that a loop never blocks in
    it. What is waited for meanwhile depends on nothing but replies of units handed out before.

    Args:
        layer_ids: The MoE layers, in the order in which a step passes them; others never arrive.
        options: The numbers behind the rules.
    """

    def __init__(self, layer_ids: Sequence[int], options: RoundOptions | None = None) -> None:
        options = options or RoundOptions()
        self.counters = RoundCounters()
        self._last_layer_id = layer_ids[-1]
        self._peers: dict[Hashable, PeerState] = {}
        self._decode = DecodeQueue(layer_ids, self._peers, options, self.counters)
        self._prefill = PrefillQueue(options, self.counters)
        self._has_changed = False  # since nothing could run

    def peer_attached(self, peer: Hashable, epoch: int, now_s: float) -> None:
        """See `UnitSource`."""
        self.peer_gone(peer, now_s)
        self._peers[peer] = PeerState(peer=peer)

    def peer_gone(self, peer: Hashable, now_s: float) -> None:
        """See `UnitSource`."""
        if (state := self._peers.pop(peer, None)) is not None:
            self._decode.gone(state)
            self._prefill.drop(peer)
            self._has_changed = True

    def announced(self, intent: Intent, now_s: float) -> None:
        """See `UnitSource`."""
        if (state := self._peers.get(intent.peer)) is not None:
            state.announce(intent)
            self._has_changed = True

    def withdrawn(self, peer: Hashable, now_s: float, first_step: int = 0) -> None:
        """See `UnitSource`."""
        if (state := self._peers.get(peer)) is not None:
            state.withdraw(first_step)
            self._has_changed = True

    def arrived(self, member: Member, now_s: float) -> None:
        """See `UnitSource`; rows of a peer that is not attached have nobody to go to."""
        if (state := self._peers.get(member.peer)) is None:
            return
        self._has_changed = True
        if not member.is_prefill:
            self._decode.arrived(state, member, now_s)
            return
        if member.step != state.step:
            self._decode.put_aside(state)
        state.prefills(member.step)
        self._prefill.add(member, now_s)

    def declined(self, member: Member, now_s: float) -> None:
        """See `UnitSource`; only prefill goes in pieces."""
        self._prefill.give_up(member)

    def next_unit(self, now_s: float) -> Unit | None:
        """See `UnitSource`."""
        if not self._has_changed and now_s < self._decode.look_at_s:
            return None
        unit = None if self._prefill.is_due(now_s) else self._next_decode_unit(now_s)
        if unit is None:
            unit = self._prefill.take(now_s, self._is_anybody_decoding())
        self._has_changed = unit is not None
        self.counters.parked_peers = sum(
            state.place is Place.ASIDE for state in self._peers.values()
        )
        return unit

    def finished(self, unit: Unit, now_s: float) -> None:
        """See `UnitSource`."""
        self._has_changed = True
        self._prefill.finished(unit, now_s)
        self._note_replies(unit, now_s)
        if unit.is_prefill:
            self._end_prefill(unit)
        else:
            self._decode.finished(unit, now_s)

    def wake_at_s(self, now_s: float) -> float | None:
        """See `UnitSource`."""
        if self._has_changed:
            return now_s
        return None if self._decode.look_at_s == math.inf else self._decode.look_at_s

    @property
    def awaited(self) -> list[tuple[Hashable, int, int]]:
        """(peer, layer_id, micro-batch) that the round in flight waits for."""
        return self._decode.awaited

    @property
    def expected(self) -> list[Hashable]:
        """The peers for which the start of a round would be held back now."""
        return [state.peer for state in self._peers.values() if state.is_expected]

    def _next_decode_unit(self, now_s: float) -> Unit | None:
        unit = self._decode.next_unit(now_s)
        if unit is not None:
            self._prefill.decode_goes(unit, now_s)
            self._note_replies(unit, now_s)
        return unit

    def _note_replies(self, unit: Unit, now_s: float) -> None:
        for member in unit.members:
            if (state := self._peers.get(member.peer)) is not None:
                state.replied_s = now_s

    def _end_prefill(self, unit: Unit) -> None:
        member = unit.members[0]
        state = self._peers.get(member.peer)
        is_last_part = member.micro_batch_id == member.num_micro_batches - 1
        is_last = unit.layer_id == self._last_layer_id and is_last_part and unit.is_last_piece
        if state is not None and is_last and not self._prefill.has(state.peer):
            state.is_prefilling = False

    def _is_anybody_decoding(self) -> bool:
        return any(state.is_decoding for state in self._peers.values())
