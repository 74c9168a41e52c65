"""What must outlive the router: epochs, where servers were, what operators and servers said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from sgl_router_afd.control.drains import Drains
from sgl_router_afd.control.epochs import Epochs
from sgl_router_afd.control.persist import Saved

FORGET_S = 600.0  # how long a server that is away, or a group without any, is remembered


class Ledger:
    """Changed by those who decide, and saved by them before anybody hears of it.

    Args:
        saved: What was saved last.
        save: Makes what it is given outlive this process, or raises.
    """

    def __init__(self, saved: Saved, save: Callable[[Saved], None]) -> None:
        self.epochs = Epochs(saved.base, saved.groups)
        self.drains = Drains(saved.drains, saved.group_drains)
        self.words = dict(saved.words)  # changed by `Departed`
        self.saved_models = saved.models
        self._models = dict(saved.models)
        self._places = dict(saved.places)
        self._unseen = dict(saved.places)
        self._away_since_s: dict[str, float] = {}
        self._save = save
        self._last = saved

    @property
    def unseen(self) -> Mapping[str, str]:
        """The group of each server that had one under an earlier router, and none here yet."""
        return self._unseen

    def note_places(self, group_of: Mapping[str, str]) -> None:
        """These servers are in these groups now."""
        self._places.update(group_of)

    def note_seen(self, server_ids: Set[str]) -> None:
        """What was saved has placed these: from now on it counts where they are here."""
        for server_id in self._unseen.keys() & server_ids:
            del self._unseen[server_id]

    def note_models(self, speaks_for: Mapping[str, str], *, is_settled: bool) -> None:
        """Names mean these models now; others that they meant before may still come back."""
        self._models = {} if is_settled else dict(self.saved_models)
        self._models.update(speaks_for)

    def forget_groups(self, names: Set[str]) -> None:
        """Nobody needs their names any more."""
        if not names:
            return
        for name in names:
            self.epochs.forget(name)
            self.drains.ask_group(name, "")
        self._forget([server_id for server_id, held in self._places.items() if held in names])

    def forget_who_is_away(self, present: Set[str], now_s: float) -> None:
        """To be called at times with the servers that are registered."""
        away = (self._places.keys() | self.drains.servers.keys()) - present
        self._away_since_s = {name: self._away_since_s.get(name, now_s) for name in away}
        for server_id, since_s in self._away_since_s.items():
            if now_s >= since_s + FORGET_S:
                self._forget([server_id])
                self.drains.ask(server_id, "", "")

    def save_epochs(self) -> None:
        """If there are new ones, save them; nobody may hear of them before.

        Raises:
            ConfigError: They cannot be saved.
        """
        if (self.epochs.base, self.epochs.groups) != (self._last.base, self._last.groups):
            self.save()

    def save(self) -> None:
        """Save what is new.

        Raises:
            ConfigError: It cannot be saved.
        """
        now = Saved(
            base=self.epochs.base,
            groups=dict(self.epochs.groups),
            places=dict(self._places),
            drains=dict(self.drains.servers),
            group_drains=dict(self.drains.groups),
            models=self._models,
            words=dict(self.words),
        )
        if now != self._last:
            self._save(now)
            self._last = now

    def _forget(self, server_ids: Iterable[str]) -> None:
        for server_id in server_ids:
            self._places.pop(server_id, None)
            self._unseen.pop(server_id, None)
