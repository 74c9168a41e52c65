"""Who was here a moment ago: an old message that somebody plays back must not bring it back."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.errors import Refused
from sglang_afd.protocol.registration import DeclineCode, Registration
from sglang_afd.protocol.signature import MAX_SKEW_S

# A message may be stamped so far ahead of the router's clock, and is taken as long after its stamp.
KEEP_S = 2 * MAX_SKEW_S


@dataclass(frozen=True, kw_only=True)
class Last:
    """What one process said last."""

    boot_id: str
    started_at_s: float
    seq: int
    sent_at_s: float
    said_goodbye: bool


class Departed:
    """Times are handed in; stamps are those of the servers' clocks."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Last, float]] = {}  # by server id, and until when

    def note(self, server_id: str, last: Last, now_s: float) -> None:
        """A server is gone."""
        self._last.pop(server_id, None)  # so that those that may be forgotten come first
        self._last[server_id] = (last, now_s + KEEP_S)

    def check(self, registration: Registration, now_s: float) -> None:
        """May this bring its server back?

        Raises:
            Refused: It is no younger than what the server said last.
        """
        last, until_s = self._last.get(registration.server_id, (None, now_s))
        if last is not None and now_s < until_s and not _is_younger(registration, last):
            what = "said goodbye" if last.said_goodbye else "has said more"
            raise Refused(
                DeclineCode.UNKNOWN_LEASE,
                f"{registration.server_id} {what} since it sent this; register again",
            )

    def expire(self, now_s: float) -> None:
        """Forget those whose messages nobody can play back any more."""
        for server_id, (_, until_s) in list(self._last.items()):
            if now_s < until_s:
                return
            del self._last[server_id]


def _is_younger(registration: Registration, last: Last) -> bool:
    if registration.boot_id != last.boot_id:
        is_later_process = registration.started_at_s > last.started_at_s
        return is_later_process or registration.sent_at_s > last.sent_at_s
    # What was on its way when the server said goodbye has a newer number, and an older stamp.
    overtaken = last.said_goodbye and registration.sent_at_s <= last.sent_at_s
    return registration.report.seq > last.seq and not overtaken
