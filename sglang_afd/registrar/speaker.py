"""Makes the messages of one server; all of them count their reports together."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from sglang_afd.protocol.registration import (
    REGISTRATION_VERSION,
    Leave,
    Registration,
    Renewal,
    Report,
)
from sglang_afd.registrar.facts import Facts, Identity

_MAX_REASON = 2000  # characters


class Speaker:
    """One for each server; any thread may ask.

    Args:
        describe: What the server knows of itself now; None while it does not know enough.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self, describe: Callable[[], Facts | None], wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.describe = describe
        self.is_draining = False  # asked to end, by a signal
        self.group, self.epoch = "", 0  # as the last lease said
        self._wall_clock = wall_clock
        self._started_at_s = wall_clock()
        self._seq = itertools.count(1)
        self._lock = threading.Lock()

    def registration(self, facts: Facts | None = None) -> Registration | None:
        """With a fresh report; None while the server does not know enough of itself."""
        facts = facts or self.describe()
        if facts is None:
            return None
        with self._lock:
            report, now_s = self._report(facts), self._wall_clock()
        identity = facts.identity
        return Registration(
            version=REGISTRATION_VERSION,
            server_id=identity.server_id,
            boot_id=identity.boot_id,
            started_at_s=self._started_at_s,
            sent_at_s=now_s,
            role=identity.role,
            models=identity.models,
            fingerprint=identity.fingerprint,
            num_experts=identity.num_experts,
            url=identity.url,
            exchange_address=identity.exchange_address,
            shard=identity.shard,
            peer_urls=identity.peer_urls,
            capacity=identity.capacity,
            group=self.group,
            epoch=self.epoch,
            report=report,
        )

    def renewal(self, facts: Facts, lease_id: str) -> Renewal:
        """That the server is still there."""
        with self._lock:
            report, now_s = self._report(facts), self._wall_clock()
        return Renewal(
            version=REGISTRATION_VERSION,
            server_id=facts.identity.server_id,
            boot_id=facts.identity.boot_id,
            lease_id=lease_id,
            sent_at_s=now_s,
            report=report,
        )

    def leave(self, identity: Identity, lease_id: str) -> Leave:
        """That the server ends."""
        return Leave(
            version=REGISTRATION_VERSION,
            server_id=identity.server_id,
            boot_id=identity.boot_id,
            lease_id=lease_id,
            sent_at_s=self._wall_clock(),
        )

    def _report(self, facts: Facts) -> Report:
        standing = facts.standing
        return Report(
            seq=next(self._seq),
            condition=standing.condition,
            reason=standing.reason[:_MAX_REASON],
            attached=standing.attached,
            lost=standing.lost[:64],
            load=standing.load,
            is_draining=self.is_draining,
        )
