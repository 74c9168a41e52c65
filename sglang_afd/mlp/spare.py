"""When a waiting MLP server steps in: the rules of spares, as decisions on what others answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from sglang_afd.mlp.group import LEASE_S, START_GRACE_S

WAITING = "spare"  # the state that such a server shows


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What of an address's `/server_info` matters here; other fields may be there."""

    role: str = ""
    state: str = ""
    boot_id: str = ""
    fingerprint: str = ""
    ep_size: int = 0
    missing_ranks: tuple[int, ...] = ()
    claimable_ranks: tuple[int, ...] | None = None  # rank 0 only

    @property
    def leads(self) -> bool:
        """Is this rank 0 of a group, serving or about to?"""
        return self.role == "mlp" and self.claimable_ranks is not None


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do; `reason` is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Ask the leader at `leader_url` for `rank`."""

    leader_url: str
    rank: int


@dataclass(frozen=True, slots=True)
class Lead:
    """Become rank 0; `is_successor` where another had been it."""

    is_successor: bool


Decision = Wait | Claim | Lead


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A server that may have to wait."""

    boot_id: str
    fingerprint: str
    ep_size: int
    owns_rank_0: bool  # started as rank 0: it leads at once unless another does already


class Watch:
    """Fed with what every address answers; says what to do now.

    Args:
        urls: The addresses of `--afd-leader`, in order.
        candidate: This server.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        urls: Sequence[str],
        candidate: Candidate,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._urls = urls
        self._candidate = candidate
        self._clock = clock
        self._leader_url = ""  # of the group that is watched; "" before the first answer
        self._heard_s = clock()  # when a leader last answered
        self._misfit = ""  # why the last leader's group is not ours

    def decide(self, answers: Sequence[Seen | None]) -> Decision:
        """One look around.

        Args:
            answers: Of each address, in order; None where nothing answers.
        """
        seen = dict(zip(self._urls, answers, strict=True))
        leaders = {url: one for url, one in seen.items() if one is not None and one.leads}
        if leaders:
            return self._beside_a_leader(leaders)
        return self._without_a_leader(list(answers))

    def _beside_a_leader(self, leaders: dict[str, Seen]) -> Decision:
        if self._leader_url not in leaders:
            # Of two groups the whole one: the other's leader came back and finds no followers.
            self._leader_url = min(leaders, key=lambda url: len(leaders[url].missing_ranks))
        self._heard_s = self._clock()
        leader = leaders[self._leader_url]
        self._misfit = self._compare(leader)
        if self._misfit:
            return Wait(self._misfit)
        if leader.claimable_ranks:
            return Claim(self._leader_url, leader.claimable_ranks[0])
        return Wait(f"no rank of the group of {self._leader_url} is free")

    def _without_a_leader(self, answers: list[Seen | None]) -> Decision:
        had_leader = bool(self._leader_url)
        if self._candidate.owns_rank_0 and not had_leader:
            return Lead(is_successor=False)
        if self._misfit:
            return Wait(self._misfit)
        place = self._own_place(answers)
        if place is None:
            return Wait(
                "rank 0 does not answer, and this server's own address is not among those of "
                "--afd-leader, so nobody would find it as rank 0"
            )
        # A stagger instead of an election: those before it in the list have gone first.
        num_before = sum(self._may_lead(one) for one in answers[:place])
        patience_s = (LEASE_S if had_leader else START_GRACE_S) + LEASE_S * num_before
        if self._clock() - self._heard_s < patience_s:
            return Wait(
                f"rank 0 does not answer; this server takes its place when it has been silent for "
                f"{patience_s:g} s"
            )
        return Lead(is_successor=had_leader)

    def _own_place(self, answers: list[Seen | None]) -> int | None:
        for place, one in enumerate(answers):
            if one is not None and one.boot_id == self._candidate.boot_id:
                return place
        return None

    def _may_lead(self, one: Seen | None) -> bool:
        return (
            one is not None
            and one.role == "mlp"
            and one.state == WAITING
            and not self._compare(one)
        )

    def _compare(self, other: Seen) -> str:
        ours = self._candidate
        if other.ep_size != ours.ep_size:
            return (
                f"the group of {self._leader_url} has --ep-size {other.ep_size}, this server has "
                f"{ours.ep_size}; start both with the same"
            )
        if other.fingerprint != ours.fingerprint:
            return (
                f"the group of {self._leader_url} serves model {other.fingerprint[:12]}, this "
                f"server has {ours.fingerprint[:12]}; start both with the same checkpoint"
            )
        return ""
