"""Which ready server gets the next request: a policy ranks the candidates, the lowest wins."""

from __future__ import annotations

from collections.abc import Callable

Rank = tuple[int, ...]
Policy = Callable[[int, int], Rank]


def least_load(num_in_flight: int, turns_away: int) -> Rank:
    """Rank by the requests this router has in flight there; equals take turns.

    Args:
        num_in_flight: Requests relayed to the server and not yet answered in full.
        turns_away: How many other servers' turns come first, counted from the last choice.
    """
    return (num_in_flight, turns_away)


def round_robin(num_in_flight: int, turns_away: int) -> Rank:
    """Rank by turn alone; the arguments are those of `least_load`."""
    return (turns_away,)


POLICIES: dict[str, Policy] = {"least_load": least_load, "round_robin": round_robin}
