"""What happened, for people who read it later: the last events, and those nobody logged yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sgl_router_afd.control.groups import View
from sgl_router_afd.control.standing import Standing

MAX_SHOWN = 200
MAX_NEWS = 65536  # so many changes of one moment are told to a log


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a person may want to read later."""

    time_s: float
    text: str


class Events:
    """The last `MAX_SHOWN`, the oldest first."""

    def __init__(self) -> None:
        self._shown: deque[Event] = deque(maxlen=MAX_SHOWN)
        self._news: deque[Event] = deque(maxlen=MAX_NEWS)
        self._stood: dict[str, Standing] = {}  # of each server with a group
        self._said: dict[str, str] = {}  # of each group, what the last event said

    def __iter__(self) -> Iterator[Event]:
        return iter(self._shown)

    def __reversed__(self) -> Iterator[Event]:
        return reversed(self._shown)

    def __len__(self) -> int:
        return len(self._shown)

    def take_news(self) -> list[Event]:
        """All since the last call, more than are shown where so much happened."""
        news = list(self._news)
        self._news.clear()
        return news

    def note(self, text: str, now_s: float) -> None:
        event = Event(time_s=now_s, text=text)
        self._shown.append(event)
        self._news.append(event)

    def note_changes(self, views: Iterable[View], now_s: float) -> None:
        """What is new of servers and groups since the last call."""
        stood, self._stood = self._stood, {}
        said, self._said = self._said, {}
        views = list(views)
        for view in views:
            for server_id, stand in view.stands.items():
                self._stood[server_id] = stand.standing
                # What begins with waiting needs no event: that it registered is one.
                if stood.get(server_id, Standing.WAITING) is not stand.standing:
                    why = f": {stand.reason}" if stand.reason else ""
                    self.note(f"{server_id} is {stand.standing}{why}", now_s)
        for view in views:
            self._said[view.name] = f"{view.name} is {view.stand.state}"
            if said.get(view.name) != self._said[view.name]:
                self.note(f"{self._said[view.name]}: {view.stand.reason}", now_s)
