"""Ends what waits on the GPU for MLP servers that do not come back; one thread and a few facts.

A captured step waits for as long as its slots are not answered, and the scheduler's thread waits
for the step. So another thread aborts the slots when the servers have been away for too long, or a
step would take longer than SGLang's own watchdog allows. What the step computes from then on is
worthless; the scheduler's thread finds that out before it looks at any result, and cleans up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from sglang_afd.attn.attach import GroupLink
from sglang_afd.config import MAX_STEP_SHARE
from sglang_afd.errors import PeerLost, StallTimeout
from sglang_afd.transport.zmq_link import LinkOptions

logger = logging.getLogger(__name__)

LOOK_S = 0.05  # between two looks
MAX_LOSSES = 3  # during one step; its rows may be what ends the servers

_Link = TypeVar("_Link", bound=GroupLink)


class Slots(Protocol):
    """What the guard needs of a slab; callable from any thread."""

    def abort(self) -> None:
        """See `Slab`."""

    def detach(self) -> None:
        """See `Slab`."""


class StallGuard(Generic[_Link]):
    """Who may attach, what runs, and whether it was given up.

    Args:
        slots: Of this server.
        make_link: Attaches to the ranks at some addresses.
        stall_timeout_s: How long the servers may be away while a step runs.
        step_limit_s: What a step may take with all its waits; inf without a limit.
        synchronize: Returns when nothing runs on the GPU.
    """

    def __init__(
        self,
        slots: Slots,
        make_link: Callable[[Sequence[str], LinkOptions], _Link],
        *,
        stall_timeout_s: float,
        step_limit_s: float,
        synchronize: Callable[[], None],
    ) -> None:
        self._slots = slots
        self._make_link = make_link
        self._stall_timeout_s = stall_timeout_s
        self._step_limit_s = step_limit_s
        self._synchronize = synchronize
        self._link: _Link | None = None  # made last
        self._lost_since_s: float | None = None
        self._num_running = 0  # steps that were launched and have not been looked at
        self._running_since_s = 0.0  # the oldest of them
        self._num_losses = 0  # since then, each cured by another link
        self._given_up = ""  # why; "" while all is well
        self._links = threading.Lock()  # held while one is made, and while steps are given up
        self._aborts = threading.Lock()  # held while the slots' state follows `_given_up`
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="afd-stall", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def connect(self, addresses: Sequence[str], options: LinkOptions) -> _Link:
        """Make a link, unless a step that was given up may still run; in the attaching thread.

        Raises:
            PeerLost: Not yet.
        """
        with self._links:
            if self._given_up:
                raise PeerLost("a step that was given up has not ended yet")
            self._link = self._make_link(addresses, options)
            self._lost_since_s = None
            self._num_losses += 1
            return self._link

    def launched(self) -> None:
        """A step runs from now on; in the scheduler's thread, as what follows."""
        if self._num_running == 0:
            self._begin_to_count()
        self._num_running += 1

    def finished(self) -> None:
        """The oldest step has ended.

        Raises:
            StallTimeout: It was given up, and its results are worthless.
        """
        self.check()
        self._begin_to_count()
        self._num_running = max(0, self._num_running - 1)

    def check(self) -> None:
        """Raise StallTimeout when what runs was given up."""
        if self._given_up:
            raise StallTimeout(self._given_up)

    def give_up(self, reason: str) -> None:
        """End every step, and leave the slots as if there had been none.

        The link is lost on purpose: the MLP servers must forget what was pending as well.
        """
        with self._links:
            with self._aborts:
                self._given_up = self._given_up or reason
                self._slots.abort()
            if self._link is not None:
                self._link.mark_lost(f"a step was given up: {reason}")
            self._synchronize()
            with self._aborts:
                self._slots.detach()
                self._num_running = 0
                self._given_up = ""

    def close(self) -> None:
        """End what runs, and stop looking."""
        self.give_up("this server stops")
        self._is_closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closing.wait(LOOK_S):
            try:
                self.look()
            except Exception:  # whatever it was, the next look must come
                logger.exception("while looking after the running step")

    def look(self) -> None:
        """Abort what has waited for too long; aborts again until it has ended."""
        if self._given_up or self._reason():
            if not self._given_up:
                with self._links:  # a link that is being made may be the cure
                    reason = self._reason()
                    if not reason:
                        return
                    logger.warning("giving up the running step: %s", reason)
                    with self._aborts:
                        self._given_up = reason
            with self._aborts:
                if self._given_up:
                    self._slots.abort()

    def _begin_to_count(self) -> None:
        self._running_since_s, self._num_losses = time.monotonic(), 0

    def _reason(self) -> str:
        now_s = time.monotonic()
        lost = None if self._link is None else self._link.lost
        if lost is None:
            self._lost_since_s = None
        elif self._lost_since_s is None:
            self._lost_since_s = now_s
        if self._num_running == 0:
            return ""
        if self._lost_since_s is not None and now_s - self._lost_since_s >= self._stall_timeout_s:
            return f"no MLP servers within --afd-stall-timeout {self._stall_timeout_s:g} s: {lost}"
        if lost is not None and self._num_losses >= MAX_LOSSES:
            return f"the MLP servers went away {MAX_LOSSES + 1} times during one step: {lost}"
        if now_s - self._running_since_s >= self._step_limit_s:
            return (
                f"a step took longer than {MAX_STEP_SHARE:.0%} of --watchdog-timeout, after which "
                f"SGLang would end this server"
            )
        return ""
