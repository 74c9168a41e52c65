"""What one server holds of the router: its lease, and when to speak next; times are handed in."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from sglang_afd.protocol.registration import (
    Condition,
    Decline,
    DeclineCode,
    Lease,
    Registration,
    Renewal,
)
from sglang_afd.registrar.facts import Facts, Identity
from sglang_afd.registrar.speaker import Speaker

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.5
MAX_RETRY_S = 4.0
RETRY_SHARE = 2 / 3  # of a lease: a router that was started anew hears of all within one
HASTY_RENEW_S = 0.5  # while the next answer is waited for: where to attach, whether to end
MIN_RENEW_S = 0.1

_AWAY = (Condition.STARTING, Condition.STALLED, Condition.DETACHED)  # from its MLP servers


class Tenancy:
    """Changed by one thread, read by any.

    Args:
        speaker: Makes the messages; is told the group and epoch of each lease.
        draw: A number from 0 to 1; servers that lost a router must not come back all at once.
    """

    def __init__(self, speaker: Speaker, draw: Callable[[], float] = random.random) -> None:
        self.lease: Lease | None = None
        self.heard_s = float("-inf")  # when a lease was given last
        self.last_error = ""  # "" since then
        self._speaker = speaker
        self._draw = draw
        self._registered: Identity | None = None  # what the lease was given for
        self._is_hasty = False  # is the next answer waited for?
        self._urgent: object = None  # part of the last report; a change of it is told at once
        self._due_s = float("-inf")
        self._retry_s = FIRST_RETRY_S
        self._max_retry_s = MAX_RETRY_S
        self._is_failing = False  # then nothing is urgent

    def holds_at(self, now_s: float) -> Lease | None:
        """The lease, if it still runs."""
        lease = self.lease
        return lease if lease is not None and now_s < self.heard_s + lease.ttl_s else None

    def next_message(self, facts: Facts, now_s: float) -> Registration | Renewal | None:
        """What to send now, if anything."""
        urgent = _urgent(facts, is_draining=self._speaker.is_draining)
        is_new = self.lease is None or facts.identity != self._registered
        has_news = (is_new or urgent != self._urgent) and not self._is_failing
        if now_s < self._due_s and not has_news:
            return None
        self._urgent = urgent
        is_away = facts.standing.condition in _AWAY
        self._is_hasty = is_away or self._speaker.is_draining
        if self.lease is None or is_new:
            self._registered = facts.identity
            return self._speaker.registration(facts)
        return self._speaker.renewal(facts, self.lease.lease_id)

    def take(self, lease: Lease, now_s: float) -> bool:
        """A router answered with a lease; returns whether what it says of the group counts."""
        self.lease, self.heard_s, self.last_error = lease, now_s, ""
        self._retry_s, self._is_failing = FIRST_RETRY_S, False
        self._max_retry_s = min(MAX_RETRY_S, RETRY_SHARE * lease.ttl_s)
        renew_s = min(lease.renew_s, HASTY_RENEW_S) if self._is_hasty else lease.renew_s
        self._due_s = now_s + max(MIN_RENEW_S, renew_s)
        return self._follow(lease)

    def decline(self, decline: Decline, now_s: float) -> None:
        """A router answered, and took nothing."""
        self.lease = None
        if decline.code is DeclineCode.UNKNOWN_LEASE and not self._is_failing:
            logger.info("the router does not know this server any more: registering again")
            self.last_error = decline.message
            self._due_s, self._is_failing = now_s, True  # once at once, then with pauses
            return
        self.fail(f"the router declines: {decline.message}", now_s)

    def fail(self, error: str, now_s: float) -> None:
        """No router took the message."""
        if error != self.last_error:
            logger.warning("not registered: %s", error)
        self.last_error = error
        pause_s = min(self._retry_s, self._max_retry_s)
        self._due_s = now_s + pause_s * (0.5 + self._draw() / 2)
        self._retry_s, self._is_failing = 2 * pause_s, True

    def _follow(self, lease: Lease) -> bool:
        speaker = self._speaker
        if lease.group == speaker.group and lease.epoch < speaker.epoch:
            self.last_error = (
                f"the router says epoch {lease.epoch} of {lease.group}, and said {speaker.epoch} "
                f"before; the larger one is kept, and what it says of the group is not followed"
            )
            logger.warning("%s", self.last_error)
            # Registering says the larger one. A router that goes back again and again is asked no
            # more often than others.
            self._registered = None
            self._is_failing = True
            return False
        if lease.group:
            speaker.group, speaker.epoch = lease.group, lease.epoch
        return True


def _urgent(facts: Facts, *, is_draining: bool) -> object:
    standing = facts.standing
    lost = tuple(loss.boot_id for loss in standing.lost)
    is_busy = standing.is_busy if is_draining else None
    return (standing.condition, standing.attached, lost, is_draining, is_busy)
