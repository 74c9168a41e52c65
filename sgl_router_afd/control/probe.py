"""When a pair probe is due, and what its outcome means.

A pair probe is one generated token: the only proof that an attention server and its MLP servers
compute together. It is made when an attention server has attached, and after trouble; not over and
over, since what is alive and idle is judged by leases and reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto


class Outcome(StrEnum):
    """What came of one probe."""

    PASSED = auto()
    DECLINED = auto()  # 4xx: the server has judged the request, not the pair
    STALLED = auto()  # 503, or no answer in time
    FAILED = auto()  # any other answer, or the connection broke
    UNREACHABLE = auto()  # no connection


class Proof(StrEnum):
    """What is known of one pair."""

    PENDING = auto()
    GOOD = auto()
    BAD = auto()


def outcome_of(http_status: int, num_tokens: int) -> Outcome:
    """Of a probe that was answered.

    Args:
        http_status: Of the answer.
        num_tokens: Generated tokens in it.
    """
    if http_status == 200:
        return Outcome.PASSED if num_tokens > 0 else Outcome.FAILED
    if 400 <= http_status < 500:
        return Outcome.DECLINED
    return Outcome.STALLED if http_status == 503 else Outcome.FAILED


@dataclass(frozen=True, kw_only=True)
class ProbeTerms:
    """How long things last."""

    timeout_s: float = 10.0  # of one probe; a first one may have to compile or capture
    first_back_off_s: float = 0.5  # after a probe that did not pass; doubled each time
    max_back_off_s: float = 15.0


@dataclass(kw_only=True, slots=True)
class _Pair:
    attachment: tuple[str, ...]  # the processes that the proof is of
    proof: Proof = Proof.PENDING
    reason: str = "its pair probe has not been made yet"
    due_s: float | None = 0.0  # None: no probe is due
    started_s: float | None = None  # of the probe that is under way
    is_stale: bool = False  # trouble came while it was under way, so that a token proves nothing
    num_failures: int = 0


class ProbeSchedule:
    """One pair for each attention server that says it is attached; times are handed in."""

    def __init__(self, terms: ProbeTerms | None = None) -> None:
        self.terms = terms or ProbeTerms()
        self._pairs: dict[str, _Pair] = {}

    @property
    def lost_s(self) -> float:
        """After so long a probe whose end was never told counts as stalled."""
        return 2 * self.terms.timeout_s

    def known(self) -> frozenset[str]:
        """The servers that were attached last."""
        return frozenset(self._pairs)

    def on_attached(self, server_id: str, attachment: tuple[str, ...], now_s: float) -> bool:
        """The server says that it is attached; a probe is due if these processes are new.

        Args:
            server_id: Of the attention server.
            attachment: Boot ids of the server and of its MLP servers.
            now_s: The time.

        Returns: Whether these processes are new.
        """
        pair = self._pairs.get(server_id)
        is_new = pair is None or pair.attachment != attachment
        if is_new:
            self._pairs[server_id] = _Pair(attachment=attachment, due_s=now_s)
        return is_new

    def on_detached(self, server_id: str) -> None:
        """The server is gone, or lost its MLP servers; attached again it has to prove itself."""
        self._pairs.pop(server_id, None)

    def on_trouble(self, server_id: str, reason: str, now_s: float, *, is_certain: bool) -> None:
        """A request or a peer met trouble with it: probe.

        Args:
            server_id: Of the attention server.
            reason: For people.
            now_s: The time.
            is_certain: Whether it gets no traffic until the probe has passed.
        """
        pair = self._pairs.get(server_id)
        if pair is None:
            return
        if is_certain:
            pair.proof, pair.reason = Proof.BAD, reason
        pair.is_stale = pair.started_s is not None
        if pair.due_s is None and pair.started_s is None:
            pair.due_s = now_s

    def due(self, now_s: float) -> list[str]:
        """The servers to probe now; one whose probe gave no answer for too long among them."""
        for server_id, pair in self._pairs.items():
            if pair.started_s is not None and now_s >= pair.started_s + self.lost_s:
                self.on_outcome(server_id, Outcome.STALLED, "the probe was lost", now_s)
        return [
            server_id
            for server_id, pair in self._pairs.items()
            if pair.due_s is not None and now_s >= pair.due_s and pair.started_s is None
        ]

    def next_due_s(self) -> float | None:
        """When a probe is due next, or one that is under way counts as lost."""
        pairs = self._pairs.values()
        due = [pair.due_s for pair in pairs if pair.due_s is not None]
        lost = [pair.started_s + self.lost_s for pair in pairs if pair.started_s is not None]
        return min(due + lost, default=None)

    def on_started(self, server_id: str, now_s: float) -> tuple[str, ...]:
        """A probe begins; hand what this returns to `on_outcome`."""
        pair = self._pairs[server_id]
        pair.started_s, pair.due_s, pair.is_stale = now_s, None, False
        return pair.attachment

    def on_outcome(
        self,
        server_id: str,
        outcome: Outcome,
        detail: str,
        now_s: float,
        attachment: tuple[str, ...] | None = None,
    ) -> None:
        """A probe ended.

        Args:
            server_id: Of the attention server.
            outcome: What came of it.
            detail: The answer or the error, for people.
            now_s: The time.
            attachment: What `on_started` returned; that of another one proves nothing now.
        """
        pair = self._pairs.get(server_id)
        if pair is None or pair.started_s is None:
            return
        if attachment is not None and attachment != pair.attachment:
            return
        pair.started_s = None
        if outcome not in (Outcome.PASSED, Outcome.DECLINED):
            # Also where trouble came meanwhile: who fails all the time has trouble all the time.
            self._reject(pair, outcome, detail, now_s)
        elif pair.is_stale:
            pair.due_s = now_s
        elif outcome is Outcome.PASSED:
            self._accept(pair, "")
        else:
            self._accept(pair, f"its pair probe was declined ({detail}); its own word counts")
        pair.is_stale = False

    def proof(self, server_id: str) -> tuple[Proof, str]:
        """What is known of the pair, and why, for people."""
        pair = self._pairs.get(server_id)
        return (Proof.PENDING, "it is not attached") if pair is None else (pair.proof, pair.reason)

    def _accept(self, pair: _Pair, reason: str) -> None:
        pair.proof, pair.reason = Proof.GOOD, reason
        pair.due_s, pair.num_failures = None, 0

    def _reject(self, pair: _Pair, outcome: Outcome, detail: str, now_s: float) -> None:
        terms = self.terms
        doubled_s = terms.first_back_off_s * 2.0 ** min(pair.num_failures, 16)
        wait_s = min(doubled_s, terms.max_back_off_s)
        pair.num_failures += 1
        pair.due_s = now_s + wait_s
        pair.proof = Proof.BAD
        pair.reason = f"its pair probe {_WHAT_HAPPENED[outcome]} ({detail})"


_WHAT_HAPPENED = {
    Outcome.STALLED: "got no token in time",
    Outcome.FAILED: "failed",
    Outcome.UNREACHABLE: "found no connection",
}
