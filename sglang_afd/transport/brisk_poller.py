"""Waiting for the next exchange without letting the core fall asleep, unless others need it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import zmq

SPIN_S = 0.010  # a layer of a small model takes a few milliseconds
CROWDED_S = 0.0005  # a yield that takes longer gave the core to somebody with work to do
HOLD_OFF = 256  # waits without spinning after that


class BriskPoller:
    """Polls sockets; stays awake for the first `SPIN_S` of a wait, unless the cores are wanted.

    Measured on two cores with one attention and one MLP server: without spinning each exchange paid
    about a millisecond for waking up. With two attention servers on the same two cores spinning
    cost 40 % of the throughput; hence the look at how long a yield takes.
    """

    def __init__(self, *sockets: zmq.Socket[bytes]) -> None:
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._also: list[zmq.Socket[bytes]] = []
        self._hold_off = 0

    def _watch(self, also: Sequence[zmq.Socket[bytes]]) -> None:
        if also == self._also:
            return
        for socket in self._also:
            self._poller.unregister(socket)
        self._also = list(also)
        for socket in also:
            self._poller.register(socket, zmq.POLLIN)

    def poll(
        self, timeout_s: float, *, spin_s: float, also: Sequence[zmq.Socket[bytes]] = ()
    ) -> list[tuple[zmq.Socket[bytes], int]]:
        """The sockets that are readable, after `timeout_s` at the latest.

        Args:
            timeout_s: 0 only looks.
            spin_s: How much of that may be spent awake.
            also: Sockets that come and go.
        """
        self._watch(also)
        waited_s = 0.0
        if self._hold_off:
            self._hold_off -= 1
        else:
            started_s = time.monotonic()
            while waited_s < min(spin_s, timeout_s):
                if ready := self._poller.poll(0):
                    return ready
                before_s = time.monotonic()
                os.sched_yield()
                after_s = time.monotonic()
                waited_s = after_s - started_s
                if after_s - before_s > CROWDED_S:
                    self._hold_off = HOLD_OFF
                    break
        return self._poller.poll(max(0, round((timeout_s - waited_s) * 1000)))
