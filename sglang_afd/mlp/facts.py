"""What an MLP server says of itself to the router."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from sglang_afd.config import Role
from sglang_afd.mlp.board import Board
from sglang_afd.mlp.imbalance import ImbalanceMeter
from sglang_afd.mlp.place import NO_RANK, Place
from sglang_afd.mlp.spare import WAITING
from sglang_afd.protocol.registration import Capacity, Condition, Load, PeerLoss, Shard
from sglang_afd.registrar.facts import Facts, Identity, Standing
from sglang_afd.topology import ExpertShard

_CONDITIONS = {
    WAITING: Condition.SPARE,
    "loading": Condition.LOADING,
    "stalled": Condition.STALLED,
    "displaced": Condition.DISPLACED,
    "ready": Condition.READY,
}


@dataclass(frozen=True, kw_only=True)
class Name:
    """What is known of it before anything is loaded; picklable."""

    server_id: str
    url: str
    peer_urls: tuple[str, ...]  # of --afd-leader
    num_experts: int  # of one layer, on all ranks


class MlpFacts:
    """Read in the HTTP process, whenever somebody asks.

    Args:
        name: Of this server.
        place: Its rank, and how it stands.
        board: Of the loop's process.
    """

    def __init__(self, name: Name, place: Place, board: Board) -> None:
        self._name = name
        self._place = place
        self._board = board
        self._meter = ImbalanceMeter()
        self._lock = threading.Lock()

    def __call__(self) -> Facts:
        """Now."""
        with self._lock:
            return Facts(identity=self._identity(), standing=self._standing())

    def _identity(self) -> Identity:
        name, report = self._name, self._place.report
        return Identity(
            server_id=name.server_id,
            boot_id=report.boot_id,
            role=Role.MLP,
            models=(),
            fingerprint=report.fingerprint,
            num_experts=name.num_experts,
            url=name.url,
            exchange_address=report.exchange_address,
            shard=_shard(report.rank, report.ep_size, name.num_experts),
            peer_urls=name.peer_urls,
            capacity=Capacity(max_running_requests=0, kv_tokens=0),
        )

    def _standing(self) -> Standing:
        state, reason = self._place.state()
        peers, group = self._board.peers.read(), self._place.group
        ranks = [member.boot_id for member in group.members()] if group is not None else []
        others = [boot_id for boot_id in ranks if boot_id != self._place.report.boot_id]
        imbalance = self._meter.measure(self._board.rows_per_expert(), time.monotonic())
        return Standing(
            condition=_CONDITIONS[state],
            reason=reason,
            attached=(*peers.attached, *others),
            lost=tuple(PeerLoss(boot_id=one.boot_id, reason=one.reason) for one in peers.lost),
            load=Load(
                num_running=0,
                num_waiting=0,
                free_kv_tokens=0,
                tokens_per_s=0.0,
                expert_imbalance=round(imbalance, 3),
            ),
        )


def _shard(rank: int, ep_size: int, num_experts: int) -> Shard | None:
    if rank == NO_RANK:
        return None
    shard = ExpertShard(rank=rank, ep_size=ep_size, num_experts=num_experts)
    return Shard(ep_rank=rank, ep_size=ep_size, first_expert=shard.first, stop_expert=shard.stop)
