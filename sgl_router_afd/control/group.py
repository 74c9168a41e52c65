"""One group at one moment: what its servers agree on, who they are, and what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from sgl_router_afd.control.registry import Entry
from sglang_afd.errors import ConfigError
from sglang_afd.protocol.registration import Condition
from sglang_afd.topology import check_coverage


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What all servers of a group must agree on."""

    fingerprint: str
    num_experts: int
    ep_size: int  # 0: its MLP servers are not registered, its attention servers know them
    own_urls: tuple[str, ...] = ()  # of those MLP servers then


@dataclass(kw_only=True)
class Group:
    """Who belongs together.

    What is worked out of its MLP servers is kept: ask for it when all of them are placed.
    """

    name: str
    shape: Shape
    mlp: dict[int, Entry] = field(default_factory=dict)  # by rank
    attn: list[Entry] = field(default_factory=list)
    is_kept: bool = False  # its members are those of before, whoever came and went since then

    @property
    def wires_itself(self) -> bool:
        """Do its attention servers attach to MLP servers that the router does not know?"""
        return self.shape.ep_size == 0

    def is_heard_by(self, entry: Entry) -> bool:
        """Does an attention server hear exactly the processes that are its ranks?

        Where these are not known, or not those of now, the attention server vouches for them.
        """
        if self.wires_itself or self.is_kept:
            return True
        return frozenset(entry.report.attached) == self.boot_ids

    def kept(self, now_of: Callable[[Entry], Entry]) -> Group:
        """The same members, as they are registered now."""
        return Group(
            name=self.name,
            shape=self.shape,
            mlp={rank: now_of(entry) for rank, entry in self.mlp.items()},
            attn=[now_of(entry) for entry in self.attn],
            is_kept=True,
        )

    @cached_property
    def boot_ids(self) -> frozenset[str]:
        """The processes of its MLP servers."""
        return frozenset(entry.boot_id for entry in self.mlp.values())

    def servers(self) -> list[Entry]:
        return [*(entry for _, entry in sorted(self.mlp.items())), *self.attn]

    @cached_property
    def gap(self) -> str:
        """What keeps its experts from being covered, for people; "" if they are."""
        if self.wires_itself:
            return ""
        missing = [str(rank) for rank in range(self.shape.ep_size) if rank not in self.mlp]
        if missing:
            return (
                f"of its {self.shape.ep_size} MLP servers rank {', '.join(missing)} is not there; "
                "start it with the same --ep-size"
            )
        for rank, entry in sorted(self.mlp.items()):
            if is_displaced(entry):
                return f"MLP server {entry.server_id} waits for rank {rank}: {entry.report.reason}"
            is_loading = entry.report.condition is Condition.LOADING
            if is_loading or not entry.registration.exchange_address:
                return f"MLP server {entry.server_id} loads the experts of rank {rank}"
        return self._uncovered

    @property
    def is_whole(self) -> bool:
        """Has every expert a server, though one of them may load it yet?"""
        has_all = len(self.mlp) == self.shape.ep_size
        is_any_displaced = any(is_displaced(entry) for entry in self.mlp.values())
        return has_all and not is_any_displaced and not self._uncovered

    @cached_property
    def _uncovered(self) -> str:
        try:
            check_coverage(self.ranges(), self.shape.num_experts)
        except ConfigError as error:
            return str(error)
        return ""

    def ranges(self) -> list[tuple[int, int]]:
        shards = [entry.registration.shard for entry in self.mlp.values()]
        return [(shard.first_expert, shard.stop_expert) for shard in shards if shard is not None]

    @cached_property
    def mlp_urls(self) -> tuple[str, ...]:
        """Where its rank 0 may be; empty if only the attention servers know."""
        if 0 in self.mlp:
            leader = self.mlp[0].registration
            return tuple(dict.fromkeys((leader.url, *leader.peer_urls)))
        others = [entry.registration for _, entry in sorted(self.mlp.items())]
        return tuple(dict.fromkeys(url for other in others for url in other.peer_urls))


def is_displaced(entry: Entry) -> bool:
    """Does another server serve its rank, as it says itself?"""
    return entry.report.condition is Condition.DISPLACED
