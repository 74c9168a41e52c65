"""Every transport behind one face, and MLP ranks on threads: what `test/contract` needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from peers import make_identity
from torch import Tensor

from sglang_afd.mlp.board import Board
from sglang_afd.mlp.loop import Loop
from sglang_afd.mlp.rank_order import RankOrder, make_rank_order
from sglang_afd.protocol.handshake import Gate
from sglang_afd.protocol.messages import ModelSpec, RefusalCode, RunUnit
from sglang_afd.rounds.units import Unit
from sglang_afd.topology import ExpertShard
from sglang_afd.transport.base import Event, Exchange, Hub, Link, Rows
from sglang_afd.transport.loopback import LoopbackHub, LoopbackLink
from sglang_afd.transport.zmq_follower import ZmqFollower
from sglang_afd.transport.zmq_handshake import GreetOptions
from sglang_afd.transport.zmq_hub import ZmqHub
from sglang_afd.transport.zmq_link import LinkOptions, ZmqLink

TURN_S = 0.01
PATIENCE_S = 60.0  # for what must happen; a test that waits so long has failed
HEARTBEAT_S = 30.0

Run = Callable[[int, int, Rows], Tensor]  # rank, layer_id, rows -> partial sum


class Transport(Protocol):
    """What a transport brings to the suite."""

    def hub(self, gate: Gate, address: str = "") -> Hub:
        """One rank's end; an address lets it follow another hub there."""

    def link(
        self,
        hubs: Sequence[Hub],
        server_id: str,
        spec: ModelSpec,
        secret: bytes,
        stall_timeout_s: float,
    ) -> Link:
        """Attach to hubs that threads poll."""

    def follow(self, hub: Hub, leader: Hub, spec: ModelSpec, secret: bytes, rank: int) -> None:
        """Let `hub` hear what `leader`, which a thread polls, tells its followers."""

    def close(self) -> None:
        """Free everything."""


class Loopback:
    """In process."""

    def hub(self, gate: Gate, address: str = "") -> Hub:
        return LoopbackHub(gate)

    def link(
        self,
        hubs: Sequence[Hub],
        server_id: str,
        spec: ModelSpec,
        secret: bytes,
        stall_timeout_s: float,
    ) -> Link:
        return LoopbackLink(
            [hub for hub in hubs if isinstance(hub, LoopbackHub)],
            server_id=server_id,
            spec=spec,
            secret=secret,
            stall_timeout_s=stall_timeout_s,
        )

    def follow(self, hub: Hub, leader: Hub, spec: ModelSpec, secret: bytes, rank: int) -> None:
        assert isinstance(hub, LoopbackHub) and isinstance(leader, LoopbackHub)
        hub.follow(leader, spec, secret, rank=rank)

    def close(self) -> None:
        return None


def link_options(
    server_id: str, spec: ModelSpec, secret: bytes, stall_timeout_s: float
) -> LinkOptions:
    """How a link of the suite attaches: patient, since the machine may be busy."""
    return LinkOptions(
        server_id=server_id,
        spec=spec,
        secret=secret,
        heartbeat_timeout_s=HEARTBEAT_S,
        stall_timeout_s=stall_timeout_s,
        handshake_timeout_s=PATIENCE_S,
    )


def follower_of(leader: Hub, spec: ModelSpec, secret: bytes, rank: int) -> ZmqFollower:
    """What lets a hub hear `leader`."""
    options = GreetOptions(
        server_id=f"mlp-{rank}",
        spec=spec,
        secret=secret,
        heartbeat_timeout_s=HEARTBEAT_S,
        handshake_timeout_s=PATIENCE_S,
    )
    return ZmqFollower(lambda: leader.address, options, rank=rank)


class Zmq:
    """ZeroMQ over `ipc` or `tcp`; each link is watched by a thread, as a server does."""

    def __init__(self, scheme: str, directory: Path) -> None:
        self._scheme = scheme
        self._directory = directory
        self._num_hubs = 0
        self._links = WatchedLinks()

    def hub(self, gate: Gate, address: str = "") -> Hub:
        self._num_hubs += 1
        fresh = {"ipc": f"ipc://{self._directory}/{self._num_hubs}", "tcp": "tcp://127.0.0.1:0"}
        return ZmqHub(gate, address or fresh[self._scheme], heartbeat_timeout_s=HEARTBEAT_S)

    def link(
        self,
        hubs: Sequence[Hub],
        server_id: str,
        spec: ModelSpec,
        secret: bytes,
        stall_timeout_s: float,
    ) -> Link:
        options = link_options(server_id, spec, secret, stall_timeout_s)
        link = ZmqLink([hub.address for hub in hubs], options)
        self._links.add(link)
        return link

    def follow(self, hub: Hub, leader: Hub, spec: ModelSpec, secret: bytes, rank: int) -> None:
        assert isinstance(hub, ZmqHub)
        hub.follow(follower_of(leader, spec, secret, rank))

    def close(self) -> None:
        self._links.close()


class Watched(Protocol):
    """A link that a thread of its own looks after."""

    def close(self) -> None: ...

    @property
    def is_closed(self) -> bool: ...

    def watch(self, timeout_s: float) -> bool: ...

    def close_watch(self) -> None: ...


class WatchedLinks:
    """Each link has a thread that does what a server's attaching thread does."""

    def __init__(self) -> None:
        self._links: list[tuple[Watched, threading.Thread]] = []

    def add(self, link: Watched) -> None:
        """Watch it until it is closed."""
        thread = threading.Thread(target=self._watch, args=(link,))
        thread.start()
        self._links.append((link, thread))

    def close(self) -> None:
        """Close all."""
        for link, thread in self._links:
            link.close()
            thread.join(PATIENCE_S)

    @staticmethod
    def _watch(link: Watched) -> None:
        while link.watch(TURN_S):
            pass
        while not link.is_closed:  # ZeroMQ wants the watched sockets closed first
            time.sleep(TURN_S)
        link.close_watch()


class Rank:
    """One MLP rank on a thread: the real loop, with `run` in place of a model's experts.

    While `pause` is in force it takes events and serves nothing.
    """

    def __init__(self, hub: Hub, rank: int, run: Run, order: PausableOrder) -> None:
        self.hub = hub
        self.board = Board(1)
        self._rank = rank
        self._run = run
        self._watched = WatchedHub(hub)
        self.events = self._watched.events
        self.served = self._watched.served
        self._must_stop = False
        self._order = order
        self._loop = Loop(self._watched, self, self.board, self._order, lambda: self._must_stop)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def pause(self) -> None:
        """Serve nothing from now on."""
        self._order.is_paused = True

    def resume(self) -> None:
        """Serve what waits."""
        self._order.is_paused = False

    def hold_polls(self) -> None:
        """Do not even look at what comes, as while experts run for long; waits until that is so."""
        self._watched.may_poll.acquire()

    def release_polls(self) -> None:
        """Look again."""
        self._watched.may_poll.release()

    def wait_for(self, kind: type[Event], number: int = 1) -> None:
        """Until so many events of a kind have come."""
        changed = self._watched.changed
        with changed:
            assert changed.wait_for(lambda: self.count(kind) >= number, PATIENCE_S)

    def count(self, kind: type[Event]) -> int:
        """How many events of a kind have come."""
        return sum(isinstance(event, kind) for event in self.events)

    def wait_replied(self, number: int = 1) -> None:
        """Until it has replied to so many exchanges."""
        changed = self._watched.changed
        with changed:
            assert changed.wait_for(lambda: self._watched.num_replied >= number, PATIENCE_S)

    def stop(self) -> None:
        """The rank dies: no goodbye, its hub is gone."""
        self._must_stop = True
        self._thread.join(PATIENCE_S)

    def run(self, layer_id: int, rows: Rows) -> Tensor:
        """What the loop wants of experts."""
        return self._run(self._rank, layer_id, rows)

    def count_rows(self, rows: Rows) -> Tensor:
        """Not looked at here."""
        return torch.zeros(1, dtype=torch.int64)

    @property
    def num_units(self) -> int:
        """How many units were handed out."""
        return self._order.num_units

    def _serve(self) -> None:
        try:
            self._loop.run()
        finally:
            self.hub.close()


class PausableOrder(RankOrder):
    """Rank 0's rounds, or what rank 0 says; and nothing while paused."""

    def __init__(
        self, hub: Hub, layer_ids: Sequence[int], rank: int, ep_size: int, has_rounds: bool
    ) -> None:
        order = make_rank_order(
            hub.order, layer_ids, rank=rank, ep_size=ep_size, has_rounds=has_rounds
        )
        super().__init__(order.source, hub.order, num_followers=order.num_followers)
        self.is_paused = False
        self.num_units = 0

    def next_unit(self, now_s: float) -> Unit | None:
        unit = None if self.is_paused else super().next_unit(now_s)
        self.num_units += unit is not None
        return unit

    def wake_at_s(self, now_s: float) -> float | None:
        return now_s + TURN_S  # whoever pauses may resume at any time


class WatchedHub(Hub):
    """A hub whose events and replies a test can see, and whose polls it can hold."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.address = hub.address
        self.events: list[Event] = []
        self.served: list[Exchange] = []
        self.num_replied = 0
        self.changed = threading.Condition()
        self.may_poll = threading.Lock()

    @property
    def num_refused(self) -> int:
        return self._hub.num_refused

    def poll(self, timeout_s: float) -> list[Event]:
        with self.may_poll:
            events = self._hub.poll(min(timeout_s, TURN_S))
        with self.changed:
            self.events += events
            self.changed.notify_all()
        return events

    def reply(self, exchange: Exchange, partial: Tensor) -> None:
        self.served.append(exchange)
        self._hub.reply(exchange, partial)
        with self.changed:
            self.num_replied += 1
            self.changed.notify_all()

    def decline(self, exchange: Exchange, code: RefusalCode, message: str) -> None:
        self.served.append(exchange)
        self._hub.decline(exchange, code, message)

    def order(self, unit: RunUnit) -> None:
        self._hub.order(unit)

    def expel(self, reason: str) -> list[Event]:
        return self._hub.expel(reason)

    def close(self) -> None:
        self._hub.close()


class ReferenceExperts:
    """Plain experts: each a matrix; a row's share is added choice by choice in float32."""

    def __init__(self, spec: ModelSpec, ep_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._shards = [
            ExpertShard(rank=rank, ep_size=ep_size, num_experts=spec.num_experts)
            for rank in range(ep_size)
        ]
        size = spec.hidden_size
        self._matrices = {
            layer_id: torch.randn(spec.num_experts, size, size, generator=generator)
            for layer_id in spec.moe_layer_ids
        }

    def run(self, rank: int, layer_id: int, rows: Rows) -> Tensor:
        """The partial sum of one rank."""
        shard, matrices = self._shards[rank], self._matrices[layer_id]
        total = torch.zeros_like(rows.hidden_states, dtype=torch.float32)
        for row, (ids, weights) in enumerate(zip(rows.topk_ids, rows.topk_weights, strict=True)):
            for expert, weight in zip(ids.tolist(), weights, strict=True):
                if shard.first <= expert < shard.stop:
                    total[row] += weight * (rows.hidden_states[row].float() @ matrices[expert])
        return total.to(rows.hidden_states.dtype)

    def expected(self, layer_id: int, rows: Rows) -> Tensor:
        """What a combine must return, bit by bit."""
        total = torch.zeros_like(rows.hidden_states, dtype=torch.float32)
        for shard in self._shards:
            total += self.run(shard.rank, layer_id, rows)
        return total.to(rows.hidden_states.dtype)


class Fleet:
    """The MLP ranks of one test and the links to them; closes all of it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.ranks: list[Rank] = []
        self._every_rank: list[Rank] = []
        self._links: list[Link] = []

    def start(
        self,
        spec: ModelSpec,
        run: Run,
        ep_size: int = 1,
        *,
        secret: bytes = b"",
        max_peers: int = 8,
        boot_id: str = "0000000100000000",
        has_rounds: bool = False,
        are_followed: bool = True,
    ) -> list[Rank]:
        """Start every rank; called again, each follows its dead predecessor at its address."""
        addresses = [rank.hub.address for rank in self.ranks] or [""] * ep_size
        self.ranks = []
        for number, address in enumerate(addresses):
            identity = make_identity(spec, rank=number, ep_size=ep_size, boot_id=boot_id)
            hub = self.transport.hub(Gate(identity, secret, max_peers=max_peers), address)
            layer_ids = spec.moe_layer_ids
            order = PausableOrder(hub, layer_ids, number, ep_size, has_rounds)
            self.ranks.append(Rank(hub, number, run, order))
            if number and has_rounds and are_followed:
                self.follow(spec, self.ranks[number], number, secret=secret)
        self._every_rank += self.ranks
        return self.ranks

    def follow(self, spec: ModelSpec, rank: Rank, number: int, *, secret: bytes = b"") -> None:
        """Let a rank follow rank 0."""
        self.transport.follow(rank.hub, self.ranks[0].hub, spec, secret, number)

    def attach(
        self,
        spec: ModelSpec,
        *,
        server_id: str = "",
        secret: bytes = b"",
        stall_timeout_s: float = PATIENCE_S,
        ranks: Sequence[Rank] | None = None,
    ) -> Link:
        """A new attention server's link."""
        hubs = [rank.hub for rank in (self.ranks if ranks is None else ranks)]
        name = server_id or f"attn-{len(self._links)}"
        link = self.transport.link(hubs, name, spec, secret, stall_timeout_s)
        self._links.append(link)
        return link

    def close(self) -> None:
        """End links and ranks."""
        for link in self._links:
            link.close()
        for rank in self._every_rank:
            rank.stop()
        self.transport.close()
