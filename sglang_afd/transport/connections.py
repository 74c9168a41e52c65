"""Which peer was it that went? Sockets tell of a lost connection by its descriptor only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable


class Connections:
    """Follows descriptors, which are reused, from one connection to the next (pure).

    A descriptor's connections follow each other: accepted, lost, accepted, lost. Some never say
    anything, such as those of a port scanner.
    """

    def __init__(self) -> None:
        self._peers: dict[int, bytes | None] = {}  # by open descriptor; None has not spoken yet
        self._known: set[bytes] = set()
        self._new: defaultdict[int, list[bytes]] = defaultdict(list)

    def is_known(self, peer: bytes) -> bool:
        """Is the descriptor of this peer on record?"""
        return peer in self._known

    def spoke(self, peer: bytes, descriptor: int) -> None:
        """A peer that is not known sent its first message."""
        self._known.add(peer)
        self._new[descriptor].append(peer)

    def settle(self, accepted: Iterable[int], lost: Iterable[int]) -> list[bytes]:
        """What the sockets told since the last call, once every message before it was read.

        Returns: The peers whose connections are lost.
        """
        num_accepted, num_lost = Counter(accepted), Counter(lost)
        gone: list[bytes] = []
        for descriptor in {*num_accepted, *num_lost, *self._new}:
            names = self._new.pop(descriptor, [])
            is_open = descriptor in self._peers
            line = [self._peers.pop(descriptor)] if is_open else []
            line += [None] * num_accepted[descriptor]
            # A newcomer is the latest connection that has not spoken; silent ones went before it.
            for place in reversed(range(len(line))):
                if line[place] is None and names:
                    line[place] = names.pop()
            num_gone = max(num_lost[descriptor], len(line) - 1)
            gone += [*names, *(peer for peer in line[:num_gone] if peer is not None)]
            if num_gone < len(line):
                self._peers[descriptor] = line[-1]
        self._known.difference_update(gone)
        return gone
