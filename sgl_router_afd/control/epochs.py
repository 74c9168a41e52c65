"""Each group's epoch: grows with every change of its members, and never goes back."""

from __future__ import annotations

from collections.abc import Callable

from sgl_router_afd.control.persist import Floors

# More changes than there will ever be. A server that tells of a larger epoch is mistaken and not
# followed: its group would come to epochs that no message has room for.
MAX_TOLD_EPOCH = 2**40


class Epochs:
    """Saves an epoch before anybody hears of it.

    Args:
        floors: What was saved last.
        save: Makes the floors outlive this process; what it raises keeps the epoch from changing.
    """

    def __init__(self, floors: Floors, save: Callable[[Floors], None]) -> None:
        self._base = floors.base
        self._groups = dict(floors.groups)
        self._save = save

    def known_names(self) -> frozenset[str]:
        return frozenset(self._groups)

    def of(self, group: str) -> int:
        """The epoch in force; 0 of a group that never had one."""
        return self._groups.get(group, 0)

    def advance(self, group: str) -> int:
        """The next epoch of a group whose members changed."""
        return self._set(group, max(self._base, self.of(group)) + 1)

    def raise_to(self, group: str, epoch: int) -> int:
        """A server says that it heard of this epoch: no smaller one may be in force."""
        # One of a name that was forgotten meanwhile is older than all that follow.
        is_newer = max(self.of(group), self._base) < epoch <= MAX_TOLD_EPOCH
        return self._set(group, epoch) if is_newer else self.of(group)

    def forget(self, group: str) -> None:
        """Its name may be given to another group, whose epochs are larger ones."""
        if group in self._groups:
            groups = {name: epoch for name, epoch in self._groups.items() if name != group}
            base = max(self._base, self._groups[group])
            self._save(Floors(base=base, groups=groups))
            self._base, self._groups = base, groups

    def _set(self, group: str, epoch: int) -> int:
        groups = self._groups | {group: epoch}
        self._save(Floors(base=self._base, groups=groups))
        self._groups = groups
        return epoch
