"""The ranks of one group as rank 0 knows them: who reported, and whose lease still runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sglang_afd.errors import ConfigError

LEASE_S = 6.0
RENEW_S = 2.0


class MemberReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank tells rank 0, again and again."""

    rank: int
    ep_size: int
    boot_id: str
    fingerprint: str
    exchange_address: str
    sent_at_s: float  # time.time(), so that an old report cannot be played back


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lease:
    report: MemberReport
    expires_at_s: float


class Group:
    """Kept by rank 0's HTTP process; starts with rank 0 itself, whose lease never ends."""

    def __init__(
        self, leader: MemberReport, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._leader = leader
        self._clock = clock
        self._leases = {0: _Lease(report=leader, expires_at_s=float("inf"))}

    def report(self, member: MemberReport) -> None:
        """Take or renew a lease.

        Raises:
            ConfigError: Another model or size, no such rank, or a rank that somebody else holds.
        """
        if not 1 <= member.rank < self._leader.ep_size or member.ep_size != self._leader.ep_size:
            raise ConfigError(
                f"rank {member.rank} of --ep-size {member.ep_size} does not fit this group of "
                f"--ep-size {self._leader.ep_size}, whose other ranks are 1 to "
                f"{self._leader.ep_size - 1}"
            )
        if member.fingerprint != self._leader.fingerprint:
            raise ConfigError(
                f"rank {member.rank} serves model {member.fingerprint[:12]}, rank 0 serves "
                f"{self._leader.fingerprint[:12]}; start both with the same checkpoint"
            )
        held = self._live().get(member.rank)
        if held is not None and held.boot_id != member.boot_id:
            raise ConfigError(
                f"rank {member.rank} is already served by {held.exchange_address}; "
                f"stop it, or wait {LEASE_S:g} s after it died"
            )
        self._leases[member.rank] = _Lease(report=member, expires_at_s=self._clock() + LEASE_S)

    def members(self) -> list[MemberReport]:
        """The live ranks, ascending."""
        live = self._live()
        return [live[rank] for rank in sorted(live)]

    def missing(self) -> list[int]:
        """The ranks that have not reported, or whose lease ran out."""
        live = self._live()
        return [rank for rank in range(self._leader.ep_size) if rank not in live]

    def _live(self) -> dict[int, MemberReport]:
        now = self._clock()
        return {
            rank: lease.report for rank, lease in self._leases.items() if lease.expires_at_s > now
        }
