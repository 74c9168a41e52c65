"""Which decode exchanges are sure to come once the replies enqueued so far have left (pure).

A stream of kernels may wait for rows that depend on nothing but replies in front of the wait. An
attention server sends the micro-batches of a layer in order, then waits for the reply of each in
turn and at once sends its rows of the next layer. So micro-batch m goes on to layer l + 1 when the
replies of layer l up to m, and of layer l - 1 for the later ones, have been enqueued. The first
layer of a step follows from no reply: the server may have no next step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from sglang_afd.rounds.units import Member


@dataclass(slots=True)
class _Step:
    """One peer's decode step; layers are counted by their index."""

    step: int = -1
    num_micro_batches: int = 1
    last: dict[int, Member] = field(default_factory=dict)  # the latest exchange, by micro-batch
    known: dict[int, int] = field(default_factory=dict)  # its layer
    replied: dict[int, int] = field(default_factory=dict)  # up to this layer replies are enqueued

    def raise_replied(self, micro_batch_id: int, layer: int) -> None:
        if layer > self.replied.get(micro_batch_id, -1):
            self.replied[micro_batch_id] = layer


class Predictor:
    """Told of real arrivals and of enqueued units, answers with what may count as arrived.

    Args:
        layer_ids: The MoE layers, in the order in which a step passes them.
        predicts: False only recognises exchanges that are known already.
    """

    def __init__(self, layer_ids: Sequence[int], *, predicts: bool = True) -> None:
        self._layer_ids = tuple(layer_ids)
        self._layers = {layer_id: layer for layer, layer_id in enumerate(layer_ids)}
        self._predicts = predicts
        self._steps: dict[Hashable, _Step] = {}

    def forget(self, peer: Hashable) -> None:
        """`peer` is gone, or attached anew."""
        self._steps.pop(peer, None)

    def arrived(self, member: Member) -> list[Member]:
        """Rows are really here.

        Returns: `member`, unless it was known, and what follows from it.
        """
        if member.is_prefill:
            return [member]
        state = self._step_of(member)
        layer, micro_batch_id = self._layers[member.layer_id], member.micro_batch_id
        if member.step < state.step or state.known.get(micro_batch_id, -1) >= layer:
            return []
        state.last[micro_batch_id], state.known[micro_batch_id] = member, layer
        # It was sent after these replies, to whomever they came from.
        for other in range(member.num_micro_batches):
            state.raise_replied(other, layer - 1 if other <= micro_batch_id else layer - 2)
        return [member, *self._follow(state)]

    def enqueued(self, members: Sequence[Member]) -> list[Member]:
        """The replies of a decode unit are enqueued; returns what follows from them."""
        following: list[Member] = []
        for member in members:
            state = self._steps.get(member.peer)
            if state is not None and state.step == member.step:
                state.raise_replied(member.micro_batch_id, self._layers[member.layer_id])
                following += self._follow(state)
        return following

    def _step_of(self, member: Member) -> _Step:
        state = self._steps.get(member.peer)
        if state is None or member.step > state.step:
            state = _Step(step=member.step, num_micro_batches=member.num_micro_batches)
            self._steps[member.peer] = state
        return state

    def _follow(self, state: _Step) -> list[Member]:
        if not self._predicts:
            return []
        following = []
        for micro_batch_id, layer in state.known.items():
            if layer + 1 < len(self._layer_ids) and self._goes_on(state, micro_batch_id, layer):
                member = replace(state.last[micro_batch_id], layer_id=self._layer_ids[layer + 1])
                state.last[micro_batch_id] = member
                following.append(member)
        for member in following:
            state.known[member.micro_batch_id] += 1
        return following

    def _goes_on(self, state: _Step, micro_batch_id: int, layer: int) -> bool:
        for other in range(state.num_micro_batches):
            if state.replied.get(other, -1) < (layer if other <= micro_batch_id else layer - 1):
                return False
        return True
