"""The one-sided exchange behind the suite's face: rows go to the GPU and come back around it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from transports import HEARTBEAT_S, WatchedLinks, follower_of, link_options

from sglang_afd.protocol.handshake import Gate
from sglang_afd.protocol.messages import (
    Dispatch,
    ModelSpec,
    RefusalCode,
    RunUnit,
    StepIntent,
    Withdrawal,
)
from sglang_afd.transport.base import Arrived, Event, Exchange, Hub, Link, Rows
from sglang_afd.transport.cuda_ipc.hub import CudaIpcHub, HubOptions
from sglang_afd.transport.cuda_ipc.layout import LinkWord, SlabShape, WaitPolicy, shape_of
from sglang_afd.transport.cuda_ipc.link import CudaIpcLink
from sglang_afd.transport.cuda_ipc.slab import Slab
from sglang_afd.transport.cuda_ipc.streams import own_stream

DEVICE = 0
NUM_SLOTS = 4
MAX_RANKS = 3


class SlabPool:
    """Slabs for one test after the other: registering a page with CUDA takes its time."""

    def __init__(self) -> None:
        self._free: dict[tuple[SlabShape, WaitPolicy], list[Slab]] = {}

    def take(self, shape: SlabShape, policy: WaitPolicy) -> Slab:
        """One that nobody uses, detached."""
        free = self._free.setdefault((shape, policy), [])
        return free.pop() if free else Slab(shape, DEVICE, policy)

    def give_back(self, slab: Slab, policy: WaitPolicy) -> None:
        """Nobody reads or writes it any more."""
        slab.detach()
        assert slab.link is LinkWord.DETACHED
        self._free[(slab.shape, policy)].append(slab)


POOL = SlabPool()


class CudaIpc:
    """Both sides in this process, on one GPU; each link has a slab and is watched by a thread."""

    def __init__(self, policy: WaitPolicy, directory: Path) -> None:
        self._policy = policy
        self._directory = directory
        self._numbers = itertools.count(1)
        self._links = WatchedLinks()
        self._slabs: list[Slab] = []

    def hub(self, gate: Gate, address: str = "") -> Hub:
        """See `Transport`."""
        options = HubOptions(
            listen=address or f"ipc://{self._directory}/{next(self._numbers)}",
            heartbeat_timeout_s=HEARTBEAT_S,
            max_peers=16,
            device=DEVICE,
        )
        return HostHub(CudaIpcHub(gate, options, door=f"{self._directory}/d{next(self._numbers)}"))

    def link(
        self,
        hubs: Sequence[Hub],
        server_id: str,
        spec: ModelSpec,
        secret: bytes,
        stall_timeout_s: float,
    ) -> Link:
        """See `Transport`."""
        options = link_options(server_id, spec, secret, stall_timeout_s)
        shape = shape_of(spec, num_slots=NUM_SLOTS, max_ranks=MAX_RANKS)
        slab = POOL.take(shape, self._policy)
        self._slabs.append(slab)
        link = CudaIpcLink([hub.address for hub in hubs], options, slab)
        self._links.add(link)
        return HostLink(link)

    def follow(self, hub: Hub, leader: Hub, spec: ModelSpec, secret: bytes, rank: int) -> None:
        """See `Transport`."""
        assert isinstance(hub, HostHub)
        hub.inner.follow(follower_of(leader, spec, secret, rank))

    def close(self) -> None:
        """See `Transport`; the hubs are closed."""
        self._links.close()
        for slab in self._slabs:
            POOL.give_back(slab, self._policy)


class HostLink(Link):
    """A link whose rows come from the host and whose sums go there."""

    def __init__(self, inner: CudaIpcLink) -> None:
        self._inner = inner
        self.ranks = inner.ranks
        self.epoch = inner.epoch

    @property
    def lost(self) -> str | None:
        """See `Link`."""
        return self._inner.lost

    def dispatch(self, header: Dispatch, rows: Rows) -> None:
        """See `Link`."""
        self._inner.dispatch(header, _moved(rows, f"cuda:{DEVICE}"))

    def combine(self, micro_batch_id: int, *, limit_s: float = math.inf) -> Tensor:
        """See `Link`."""
        return self._inner.combine(micro_batch_id, limit_s=limit_s).cpu()

    def announce(self, message: StepIntent | Withdrawal) -> None:
        """See `Link`."""
        self._inner.announce(message)

    def mark_lost(self, reason: str) -> None:
        """See `Link`."""
        self._inner.mark_lost(reason)

    def close(self) -> None:
        """See `Link`."""
        self._inner.close()


class HostHub(Hub):
    """A hub whose rows are copied to the host, for experts that run there."""

    def __init__(self, inner: CudaIpcHub) -> None:
        self.inner = inner
        self.address = inner.address
        self._stream = own_stream(DEVICE, is_urgent=True)  # never behind a link that waits

    @property
    def num_refused(self) -> int:
        """See `Hub`."""
        return self.inner.num_refused

    def poll(self, timeout_s: float) -> list[Event]:
        """See `Hub`."""
        with torch.cuda.stream(self._stream):
            return [self._on_host(event) for event in self.inner.poll(timeout_s)]

    def reply(self, exchange: Exchange, partial: Tensor) -> None:
        """See `Hub`."""
        with torch.cuda.stream(self._stream):
            self.inner.reply(exchange, partial.contiguous().to(f"cuda:{DEVICE}"))

    def decline(self, exchange: Exchange, code: RefusalCode, message: str) -> None:
        """See `Hub`."""
        self.inner.decline(exchange, code, message)

    def order(self, unit: RunUnit) -> None:
        """See `Hub`."""
        self.inner.order(unit)

    def expel(self, reason: str) -> list[Event]:
        """See `Hub`."""
        return self.inner.expel(reason)

    def close(self) -> None:
        """See `Hub`."""
        with torch.cuda.stream(self._stream):
            self.inner.close()

    def _on_host(self, event: Event) -> Event:
        if not isinstance(event, Arrived):
            return event
        rows = _moved(event.exchange.rows, "cpu")
        return Arrived(exchange=msgspec.structs.replace(event.exchange, rows=rows))


def _moved(rows: Rows, device: str) -> Rows:
    return Rows(
        hidden_states=rows.hidden_states.to(device),
        topk_ids=rows.topk_ids.to(device),
        topk_weights=rows.topk_weights.to(device),
    )
