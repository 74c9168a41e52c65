"""What a server knows of itself at one moment, in the words of a registration."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.config import Role
from sglang_afd.protocol.registration import Capacity, Condition, Load, PeerLoss, Shard


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Registered; a change of it is registered anew."""

    server_id: str
    boot_id: str
    role: Role
    models: tuple[str, ...]
    fingerprint: str
    num_experts: int
    url: str
    exchange_address: str
    shard: Shard | None
    peer_urls: tuple[str, ...]
    capacity: Capacity


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Reported, again and again."""

    condition: Condition
    reason: str
    attached: tuple[str, ...]
    lost: tuple[PeerLoss, ...]
    load: Load

    @property
    def is_busy(self) -> bool:
        """Does it have requests?"""
        return self.load.num_running + self.load.num_waiting > 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Both at once."""

    identity: Identity
    standing: Standing
