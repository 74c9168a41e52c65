"""What a step that could not be finished means for its requests."""

from __future__ import annotations

import logging
import time

from sglang_afd.attn.runtime import Runtime
from sglang_afd.errors import ExchangeFailed, PeerLost
from sglang_afd.upstream import requests
from sglang_afd.upstream.scheduler import Scheduler

logger = logging.getLogger(__name__)

PARKED_TURN_S = 0.05  # between two looks at what clients send, while no step can run
MAX_ATTEMPTS = 3  # to get one more token for a request


class Recovery:
    """One in a scheduler process; called when an error of ours has ended SGLang's event loop.

    Afterwards the event loop can be entered again.
    """

    def __init__(self, here: Runtime) -> None:
        self._here = here
        self._num_steps = -1  # that had been run when requests were retracted last
        self._attempts: dict[str, tuple[int, int]] = {}  # tokens and attempts, of the last stall

    def after_failure(self, scheduler: Scheduler, error: PeerLost) -> None:
        """Every request fails: running these rows again would not help."""
        self._fail_all(scheduler, f"{_blame(error)} ({error})")

    def after_stall(self, scheduler: Scheduler, error: PeerLost) -> None:
        """Retract what runs, and wait for MLP servers while SGLang goes on reading its input.

        The requests fail if nobody comes, or if they were retracted before and nothing has run
        since; and each one that got no further in several attempts, whatever ran beside it: a
        request whose rows end the MLP servers must not do so for ever.
        """
        if self._num_steps == self._here.num_steps:
            self._fail_all(scheduler, f"the MLP servers ran no step in two attempts ({error})")
            return
        self._num_steps = self._here.num_steps
        before, self._attempts = self._attempts, {}
        num_retracted, num_failed = requests.retract_running_requests(
            scheduler, lambda rid, num_tokens: self._count_attempt(rid, num_tokens, before)
        )
        self._count(retracted=num_retracted, failed=num_failed)
        logger.warning(
            "gave up a step: %s; %d request(s) wait to be prefilled again", error, num_retracted
        )
        self._here.hold_requests()
        if not self._wait_attached(scheduler):
            self._fail_all(
                scheduler, f"the MLP servers are away ({self._here.board.read().reason})"
            )

    def _count_attempt(self, rid: str, num_tokens: int, before: dict[str, tuple[int, int]]) -> bool:
        """Has this request had all its attempts?"""
        had_tokens, attempts = before.get(rid, (num_tokens, 0))
        attempts = attempts + 1 if had_tokens == num_tokens else 1
        self._attempts[rid] = (num_tokens, attempts)
        return attempts >= MAX_ATTEMPTS

    def _wait_attached(self, scheduler: Scheduler) -> bool:
        """False when the deadline has passed; True as well when SGLang is told to stop."""
        while not self._here.wait_attached_again(PARKED_TURN_S):
            if time.monotonic() >= self._here.board.read().held_until_s:
                return False
            requests.read_input(scheduler)
            if scheduler.gracefully_exit:
                break
        return True

    def _fail_all(self, scheduler: Scheduler, message: str) -> None:
        self._num_steps = -1
        num_failed = requests.fail_all_requests(scheduler, f"{message}; try again shortly")
        self._count(retracted=0, failed=num_failed)
        logger.warning("failed %d request(s): %s", num_failed, message)

    def _count(self, *, retracted: int, failed: int) -> None:
        board = self._here.board
        status = board.read()
        board.update(
            num_retracted_requests=status.num_retracted_requests + retracted,
            num_failed_requests=status.num_failed_requests + failed,
        )


def _blame(error: PeerLost) -> str:
    if isinstance(error, ExchangeFailed):
        return "the MLP servers could not run the experts"
    return "the MLP servers are away"
