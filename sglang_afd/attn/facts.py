"""What an attention server says of itself to the router."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sglang_afd.attn.load import RateMeter
from sglang_afd.attn.status import LinkState, Status, StatusBoard
from sglang_afd.config import Role
from sglang_afd.protocol.registration import Capacity, Condition, Load, PeerLoss
from sglang_afd.registrar.facts import Facts, Identity, Standing

_CONDITIONS = {
    LinkState.STARTING: Condition.STARTING,
    LinkState.READY: Condition.READY,
    LinkState.STALLED: Condition.STALLED,
    LinkState.DETACHED: Condition.DETACHED,
}


@dataclass(frozen=True, kw_only=True)
class Name:
    """What is known of it before anything is loaded."""

    server_id: str
    models: tuple[str, ...]  # that requests may say
    url: str
    peer_urls: tuple[str, ...]  # of --afd-mlp


class AttnFacts:
    """Read from the boards of the scheduler process, whenever somebody asks.

    Args:
        name: Of this server.
        board: Of the scheduler process.
        is_warm: Has the warm-up request been answered?
        count_open: Requests that clients wait for, those among them that no scheduler has seen.
    """

    def __init__(
        self,
        name: Name,
        board: StatusBoard,
        is_warm: threading.Event,
        count_open: Callable[[], int],
    ) -> None:
        self._name = name
        self._board = board
        self._is_warm = is_warm
        self._count_open = count_open
        self._meter = RateMeter()

    def __call__(self) -> Facts | None:
        """Now; None until the scheduler has sized its cache."""
        now_s = time.monotonic()
        status = self._board.read().at(now_s)
        if not status.kv_tokens:
            return None
        return Facts(identity=self._identity(status), standing=self._standing(status, now_s))

    def _identity(self, status: Status) -> Identity:
        return Identity(
            server_id=self._name.server_id,
            boot_id=status.boot_id,
            role=Role.ATTN,
            models=self._name.models,
            fingerprint=status.fingerprint,
            num_experts=status.num_experts,
            url=self._name.url,
            exchange_address="",
            shard=None,
            peer_urls=self._name.peer_urls,
            capacity=Capacity(
                max_running_requests=status.max_running_requests, kv_tokens=status.kv_tokens
            ),
        )

    def _standing(self, status: Status, now_s: float) -> Standing:
        state, reason = told_state(status, is_warm=self._is_warm.is_set())
        return Standing(
            condition=_CONDITIONS[state],
            reason=reason,
            attached=tuple(rank["boot_id"] for rank in status.ranks),
            lost=tuple(PeerLoss(boot_id=boot_id, reason=reason) for boot_id in status.lost),
            load=self._load(now_s),
        )

    def _load(self, now_s: float) -> Load:
        board = self._board.load
        load = board.read()
        # A scheduler inside a step has not seen what came meanwhile, nor has one that is parked.
        unseen = self._count_open() - load.num_running
        return Load(
            num_running=load.num_running,
            num_waiting=max(load.num_waiting, unseen),
            free_kv_tokens=load.free_kv_tokens,
            tokens_per_s=round(self._meter.rate(board.num_tokens, now_s), 3),
            expert_imbalance=0.0,
        )


def told_state(status: Status, *, is_warm: bool) -> tuple[LinkState, str]:
    """How the server stands, and why, as it is told to people and routers."""
    if status.state is LinkState.READY and not is_warm:
        return LinkState.STARTING, "the warm-up request is running"
    if status.state is LinkState.STARTING and not status.reason:
        return LinkState.STARTING, "waiting for the MLP servers"
    return status.state, status.reason
