"""Each group's epoch: grows with every change of its members, and never goes back."""

from __future__ import annotations

from collections.abc import Mapping

# More changes than there will ever be. A server that tells of a larger epoch is mistaken and not
# followed: its group would come to epochs that no message has room for.
MAX_TOLD_EPOCH = 2**40


class Epochs:
    """Whoever changes one saves it before anybody hears of it: see `Ledger`.

    Args:
        base: Of groups that are not named, since they were forgotten.
        groups: By name.
    """

    def __init__(self, base: int, groups: Mapping[str, int]) -> None:
        self.base = base
        self.groups = dict(groups)

    def known_names(self) -> frozenset[str]:
        return frozenset(self.groups)

    def of(self, group: str) -> int:
        """The epoch in force; 0 of a group that never had one."""
        return self.groups.get(group, 0)

    def advance(self, group: str) -> int:
        """The next epoch of a group whose members changed."""
        self.groups[group] = max(self.base, self.of(group)) + 1
        return self.groups[group]

    def raise_to(self, group: str, epoch: int) -> int:
        """A server says that it heard of this epoch: no smaller one may be in force."""
        # One of a name that was forgotten meanwhile is older than all that follow.
        if max(self.of(group), self.base) < epoch <= MAX_TOLD_EPOCH:
            self.groups[group] = epoch
        return self.of(group)

    def forget(self, group: str) -> None:
        """Its name may be given to another group, whose epochs are larger ones."""
        self.base = max(self.base, self.groups.pop(group, 0))
