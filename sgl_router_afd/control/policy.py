"""Which of the candidates gets a request: the policies, given what each server holds now.

A reported count is old when it is read. So a server's load is what others have there, by its last
report, and what this router has there now, which is exact: each choice is counted at once, and a
burst is spread though no report has come meanwhile.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

KV_SCARCE = 0.8  # beyond this share of used KV tokens a server counts as fuller than it seems
PREFIX_SLACK = 1.25  # a sticky server may have this times the mean load
PREFIX_SLACK_REQUESTS = 4  # and so many requests more, since a mean of few says little


@dataclass(kw_only=True, slots=True)
class Candidate:
    """One server that may get the request.

    Not frozen: a relay process keeps it over many requests and sets the numbers of now, since to
    make one for each server and request costs more than to choose.
    """

    server_id: str
    num_reported: int  # running and waiting, by its last report
    num_in_flight_then: int  # of this router, when that report came
    num_in_flight: int  # of this router, now
    max_running: int  # 0: not known
    free_kv_tokens: int  # by its last report
    kv_tokens: int  # 0: not known
    turns_away: int  # of equals the one with the smallest comes first
    num_of_others: int = field(init=False)  # requests that are not of this router
    used_kv_share: float = field(init=False)  # by its last report

    def __post_init__(self) -> None:
        self.num_of_others = max(0, self.num_reported - self.num_in_flight_then)
        free = min(self.free_kv_tokens, self.kv_tokens)
        self.used_kv_share = 1.0 - free / self.kv_tokens if self.kv_tokens else 0.0

    @property
    def load(self) -> int:
        """Requests that it holds now, as far as this router can know."""
        return self.num_of_others + self.num_in_flight

    @property
    def fullness(self) -> float:
        """Its load beside what it can hold, and more where its KV cache is nearly full."""
        load, reported, limit = self.load, self.num_reported, self.max_running
        share = load / limit if limit else float(load)
        used = self.used_kv_share
        if load > reported > 0:  # those sent since then need as much as those it reported
            used *= load / reported
        if used <= KV_SCARCE:
            return share
        pressure = min(1.0, (used - KV_SCARCE) / (1.0 - KV_SCARCE))
        return share + pressure * (1.0 if limit else load + 1.0)


Policy = Callable[[Sequence[Candidate], bytes, random.Random], Candidate]


def least_load(candidates: Sequence[Candidate], key: bytes, rng: random.Random) -> Candidate:
    """The least full server; equals take turns."""
    return _least_full(candidates)


def round_robin(candidates: Sequence[Candidate], key: bytes, rng: random.Random) -> Candidate:
    """Each in turn."""
    return min(candidates, key=lambda one: one.turns_away)


def power_of_two(candidates: Sequence[Candidate], key: bytes, rng: random.Random) -> Candidate:
    """The less full one of two that are drawn: good where several routers share the servers."""
    drawn = rng.sample(candidates, min(2, len(candidates)))
    return _least_full(drawn)


def prefix(candidates: Sequence[Candidate], key: bytes, rng: random.Random) -> Candidate:
    """The server that had the same beginning before, unless it is much fuller than the others.

    Every key has an order of the servers of its own (rendezvous hashing), so one that comes or goes
    moves only the keys that it wins or had.
    """
    if not key:
        return least_load(candidates, key, rng)
    mean = sum(one.load for one in candidates) / len(candidates)
    limit = mean * PREFIX_SLACK + PREFIX_SLACK_REQUESTS
    # By load, not fullness: a cache that is full of this prefix is why the request goes there.
    fitting = [one for one in candidates if one.load <= limit and not _is_full(one)]
    if not fitting:
        return least_load(candidates, key, rng)
    return max(fitting, key=lambda one: _weight(key, one.server_id))


POLICIES: dict[str, Policy] = {
    "least_load": least_load,
    "prefix": prefix,
    "round_robin": round_robin,
    "power_of_two": power_of_two,
}


def _least_full(candidates: Sequence[Candidate]) -> Candidate:
    best, least = candidates[0], math.inf
    for one in candidates:
        fullness = one.fullness
        if fullness < least or (fullness == least and one.turns_away < best.turns_away):
            best, least = one, fullness
    return best


def _is_full(one: Candidate) -> bool:
    return 0 < one.max_running <= one.load


def _weight(key: bytes, server_id: str) -> bytes:
    return hashlib.blake2b(server_id.encode(), key=key[:64], digest_size=8).digest()
