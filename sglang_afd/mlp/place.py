"""Which rank this server is, as its HTTP process knows it, from waiting over loading to serving."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_afd.mlp.board import Board, Counter, State
from sglang_afd.mlp.group import LEASE_S, RENEW_S, START_GRACE_S, Group, MemberReport
from sglang_afd.mlp.spare import WAITING

NO_RANK = -1
# For the ranks that a predecessor led: one that hangs without ending is asked first, each time.
SUCCESSOR_GRACE_S = LEASE_S + 2 * RENEW_S
LOOP_AGE_LIMIT_S = 60.0  # beyond it the loop counts as hanging; an expert run is shorter


class Place:
    """Changed by the HTTP process's one thread, read by its endpoints.

    Args:
        info: What `/server_info` answers before the experts are loaded.
        report: With `NO_RANK` and without an exchange address where those are not known yet.
        board: Says whether the loop turns.
    """

    def __init__(self, info: dict[str, Any], report: MemberReport, board: Board) -> None:
        self.info = info
        self.report = report
        self.group: Group | None = None  # of rank 0 only
        self.reason = ""  # why a spare waits
        self.refusal = ""  # what the leader says while another server holds this rank
        self._board = board
        self._has_waited = False

    @property
    def rank(self) -> int:
        """`NO_RANK` while this server waits as a spare."""
        return self.report.rank

    def wait(self, reason: str) -> None:
        """Go on waiting."""
        self.reason = reason
        self._has_waited = True

    def take(self, rank: int) -> None:
        """Become a rank that another one leads."""
        self.report = msgspec.structs.replace(self.report, rank=rank)

    def lead(self, *, is_successor: bool) -> None:
        """Become rank 0, which keeps the register."""
        self.take(0)
        grace_s = SUCCESSOR_GRACE_S if is_successor else START_GRACE_S
        self.group = Group(self.report, grace_s=grace_s)

    def serve(self, info: dict[str, Any], exchange_address: str) -> None:
        """The experts are loaded."""
        self.info = info
        self.report = msgspec.structs.replace(self.report, exchange_address=exchange_address)
        if self.group is not None:
            self.group.lead(self.report)

    def state(self) -> tuple[str, str]:
        """What this server does, and why where that is not serving."""
        if self.rank == NO_RANK:
            return WAITING, self.reason
        if not self.report.exchange_address:
            return "loading", f"loading the experts of rank {self.rank}"
        if self._board.read()[Counter.STATE] != State.SERVING:
            return "stalled", "not serving"
        if self._board.age_s() > LOOP_AGE_LIMIT_S:
            return "stalled", f"the loop last turned {self._board.age_s():.0f} s ago"
        if self.refusal:
            return "displaced", self.refusal
        return "ready", ""

    def is_well(self) -> bool:
        """May an orchestrator leave it alone?

        A rank that loads at its start is not up yet. A spare was, and must not be ended for
        loading when it is needed.
        """
        state, _ = self.state()
        return state in (WAITING, "ready", "displaced") or (state == "loading" and self._has_waited)
