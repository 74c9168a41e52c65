"""Keeps the way from a doorbell to a launch in the core's caches while nothing comes.

A loop that turns in vain for some milliseconds touches little code, and whoever shares the core's
caches pushes out the rest: measured on two cores, the first launch after 20 ms took 175 us, right
after another one 35 us. So a peer that does not exist rings a few thousand times a second, and its
unit goes through the very code of a real one, on parts of its own; only a launch is not a unit's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_afd.mlp.board import Board
from sglang_afd.mlp.device_loop import DeviceLoop
from sglang_afd.mlp.device_units import DeviceUnits
from sglang_afd.mlp.rank_order import RankOrder
from sglang_afd.mlp.row_buckets import RowBuckets
from sglang_afd.protocol.messages import Kind
from sglang_afd.rounds.prediction import Predictor
from sglang_afd.rounds.rounds import Rounds
from sglang_afd.transport.base import Event, PeerAttached
from sglang_afd.transport.cuda_ipc import layout
from sglang_afd.transport.cuda_ipc.doorbells import Doorbells
from sglang_afd.transport.cuda_ipc.listening import Listener, OpenPeer
from sglang_afd.transport.cuda_ipc.unit_ring import (
    HEADER_WORDS,
    MEMBER_WORDS,
    RING_UNITS,
    TOLD_WORDS,
    UnitRing,
)

_LAYER, _PEER, _EPOCH = 0, b"rehearsal", 1
_ATTACHED = PeerAttached(peer=_PEER, server_id="rehearsal", epoch=_EPOCH)


class Rehearsal:
    """One peer, one layer, one row.

    Args:
        launch: In place of a unit's graph.
    """

    def __init__(self, launch: Callable[[], object]) -> None:
        page = memoryview(bytearray(layout.DOORBELL_BYTES))
        self._words = page.cast("I")
        hub = _Hub(Doorbells(page, 1))
        order = RankOrder(Rounds((_LAYER,)), lambda unit: None, num_followers=0)
        self._device = _Device(hub, launch)
        experts: Any = None  # there is a graph
        self._loop = DeviceLoop(
            hub,
            DeviceUnits(self._device, experts, RowBuckets((1,), 1), {(_LAYER, 1): self._device}),
            Board(0),
            order,
            lambda: False,
            predictor=Predictor((_LAYER,)),
        )
        order.peer_attached(_PEER, _EPOCH, 0.0)
        self._loop.attached(_ATTACHED)
        self._step = 0

    def run(self) -> None:
        """One step, from its doorbell to its end."""
        self._step += 1
        self._ring()
        self._loop.turn()
        self._device.finish()
        self._loop.turn()

    def _ring(self) -> None:
        step = self._step & 0xFFFFFFFF
        header = (step, _EPOCH, 0, step, 0, _LAYER, 0, 1, layout.KINDS.index(Kind.DECODE), 1)
        line = (step, *header)
        for at, word in enumerate((*line, layout.sum_of_ring(line))):
            self._words[at] = word


class _Hub:
    num_refused = 0

    def __init__(self, doorbells: Doorbells) -> None:
        rows: Any = None  # nobody looks at them
        self._doorbells = doorbells
        self._listener = Listener((_LAYER,), 1, lambda found, header: rows)
        self._peer = OpenPeer(index=0, event=_ATTACHED, num_slots=1, doorbells=doorbells)

    def poll(self, timeout_s: float) -> list[Event]:
        return self._listener.arrivals(self._peer, self._doorbells.rung())

    def peer_index(self, peer: bytes) -> int | None:
        return 0

    def expel(self, reason: str) -> list[Event]:
        return []

    def seq_of_next(self, index: int, slot: int, *, is_served: bool) -> int:
        return self._doorbells.seq_of_next(slot, is_served=is_served)


class _Device(UnitRing):
    """A unit is done when it is told so."""

    def __init__(self, hub: _Hub, launch: Callable[[], object]) -> None:
        words = np.zeros((RING_UNITS, HEADER_WORDS + MEMBER_WORDS), np.uint32)
        self._told = np.zeros(TOLD_WORDS, np.uint32)
        super().__init__(hub, {_LAYER: 0}, words, self._told)
        self._launch = launch

    def replay(self) -> None:
        self._launch()

    def finish(self) -> None:
        """As the last kernel of a unit does."""
        self._told[0] = self.num_submitted & 0xFFFFFFFF

    def pull(self, bucket: int) -> Any:
        raise AssertionError("there is a graph")

    push: Any = pull
