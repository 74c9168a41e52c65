"""Who was here a moment ago: an old message that somebody plays back must not bring it back.

What those said who are here is kept too, for the next router: it knows nobody yet.
"""

from __future__ import annotations

from sgl_router_afd.control.persist import SavedWord
from sglang_afd.errors import Refused
from sglang_afd.protocol.registration import DeclineCode, Registration
from sglang_afd.protocol.signature import MAX_SKEW_S

# A message may be stamped so far ahead of the router's clock, and is taken as long after its stamp.
KEEP_S = 2 * MAX_SKEW_S


class Departed:
    """Times are handed in; stamps are those of the servers' clocks.

    Args:
        words: What each server said last, by its id; those of an earlier router count as gone.
        started_s: When this router began.
    """

    def __init__(self, words: dict[str, SavedWord], started_s: float) -> None:
        self._words = words
        self._until_s = dict.fromkeys(words, started_s + KEEP_S)  # of those that are gone

    def note_arrival(self, server_id: str, word: SavedWord) -> None:
        """A server registered."""
        self._words[server_id] = word
        self._until_s.pop(server_id, None)

    def note(self, server_id: str, last: SavedWord, now_s: float) -> None:
        """A server is gone."""
        self._words[server_id] = last
        self._until_s.pop(server_id, None)  # so that those that may be forgotten come first
        self._until_s[server_id] = now_s + KEEP_S

    def check(self, registration: Registration, now_s: float) -> None:
        """May this bring its server back?

        Raises:
            Refused: It is no younger than what the server said last.
        """
        last = self._words.get(registration.server_id)
        until_s = self._until_s.get(registration.server_id, now_s)
        if last is not None and now_s < until_s and not _is_younger(registration, last):
            what = "said goodbye" if last.said_goodbye else "has said more"
            raise Refused(
                DeclineCode.UNKNOWN_LEASE,
                f"{registration.server_id} {what} since it sent this; register again",
            )

    def expire(self, now_s: float) -> None:
        """Forget those whose messages nobody can play back any more."""
        for server_id, until_s in list(self._until_s.items()):
            if now_s < until_s:
                return
            del self._until_s[server_id], self._words[server_id]


def _is_younger(registration: Registration, last: SavedWord) -> bool:
    if registration.boot_id != last.boot_id:
        is_later_process = registration.started_at_s > last.started_at_s
        return is_later_process or registration.sent_at_s > last.sent_at_s
    # What was on its way when the server said goodbye has a newer number, and an older stamp.
    overtaken = last.said_goodbye and registration.sent_at_s <= last.sent_at_s
    return registration.report.seq > last.seq and not overtaken
