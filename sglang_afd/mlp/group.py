"""The ranks of one group as rank 0 knows them: who reported, and whose lease still runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sglang_afd.errors import ConfigError

LEASE_S = 6.0
RENEW_S = 2.0
START_GRACE_S = 120.0  # for a rank that was never there: longer than a server's imports take


class MemberReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank tells rank 0, again and again, from before it loads its experts."""

    rank: int
    ep_size: int
    boot_id: str
    fingerprint: str
    exchange_address: str  # "" while the experts load: the rank is taken and does not serve
    sent_at_s: float  # time.time(), so that an old report cannot be played back
    is_claim: bool = False  # of a spare, which may have the rank only if its owner is missing


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lease:
    report: MemberReport
    expires_at_s: float


class Group:
    """Kept by rank 0's HTTP process; starts with rank 0 itself, whose lease never ends.

    Args:
        leader: Rank 0's own report.
        grace_s: How long ranks that were never there have, before a spare may take their place.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        leader: MemberReport,
        *,
        grace_s: float = START_GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leader = leader
        self._clock = clock
        self._grace_ends_s = clock() + grace_s
        self._leases = {0: _Lease(report=leader, expires_at_s=float("inf"))}

    def lead(self, leader: MemberReport) -> None:
        """Replace rank 0's own report, when its exchange address is known."""
        self._leader = leader
        self._leases[0] = _Lease(report=leader, expires_at_s=float("inf"))

    def report(self, member: MemberReport) -> None:
        """Take or renew a lease.

        Raises:
            ConfigError: Another model or size, no such rank, a rank that somebody else holds, or a
                claim to one whose owner may still come.
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
                f"rank {member.rank} is already {_described(held)}; "
                f"stop it, or wait {LEASE_S:g} s after it died"
            )
        if member.is_claim and held is None and member.rank not in self.claimable():
            raise ConfigError(
                f"rank {member.rank} was never there and may still come; a spare may take its "
                f"place in {self.grace_left_s():.0f} s"
            )
        self._leases[member.rank] = _Lease(report=member, expires_at_s=self._clock() + LEASE_S)

    def members(self) -> list[MemberReport]:
        """The live ranks that serve, ascending."""
        return [report for _, report in sorted(self._live().items()) if report.exchange_address]

    def missing(self) -> list[int]:
        """The ranks that do not serve: never reported, lease ran out, or still loading."""
        serving = {member.rank for member in self.members()}
        return [rank for rank in range(self._leader.ep_size) if rank not in serving]

    def loading(self) -> list[int]:
        """Those of the missing ranks that somebody loads the experts of."""
        return [rank for rank, held in sorted(self._live().items()) if not held.exchange_address]

    def claimable(self) -> list[int]:
        """The ranks that a spare may take: lost, or not there when the grace ended."""
        live = self._live()
        has_grace = self.grace_left_s() > 0
        return [
            rank
            for rank in range(self._leader.ep_size)
            if rank not in live and (rank in self._leases or not has_grace)
        ]

    def grace_left_s(self) -> float:
        """How long ranks that were never there still have."""
        return max(0.0, self._grace_ends_s - self._clock())

    def _live(self) -> dict[int, MemberReport]:
        now = self._clock()
        return {
            rank: lease.report for rank, lease in self._leases.items() if lease.expires_at_s > now
        }


def _described(held: MemberReport) -> str:
    if held.exchange_address:
        return f"served by {held.exchange_address}"
    return f"being loaded by another server (boot id {held.boot_id})"
