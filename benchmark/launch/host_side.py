"""The MLP side's loop with everything that is real but the GPU, and attention servers that ring."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from host_slots import HostSlab, HostTable
from peers import make_identity, make_spec

from sglang_afd.mlp.board import Board
from sglang_afd.mlp.device_loop import DeviceLoop
from sglang_afd.mlp.device_units import DeviceUnits
from sglang_afd.mlp.rank_order import make_rank_order
from sglang_afd.mlp.rehearsal import Rehearsal
from sglang_afd.mlp.row_buckets import DEFAULT_GRAPH_ROWS, RowBuckets
from sglang_afd.protocol.handshake import Gate
from sglang_afd.protocol.messages import Kind, StepIntent
from sglang_afd.rounds.prediction import Predictor
from sglang_afd.transport.cuda_ipc import layout
from sglang_afd.transport.cuda_ipc.hub import CudaIpcHub, HubOptions
from sglang_afd.transport.cuda_ipc.layout import shape_of
from sglang_afd.transport.cuda_ipc.link import CudaIpcLink
from sglang_afd.transport.cuda_ipc.unit_ring import (
    HEADER_WORDS,
    MEMBER_WORDS,
    RING_UNITS,
    TOLD_WORDS,
    UnitRing,
)
from sglang_afd.transport.zmq_link import LinkOptions

LAYERS = tuple(range(48))  # of Qwen3-30B-A3B
ROWS = 64  # of each peer
MAX_MEMBERS = 32
LIMIT_S = 30.0


class StubDevice(UnitRing):
    """Real descriptors; a launch is a note, and a unit is done when it is told so."""

    def __init__(self, table: HostTable) -> None:
        words = np.zeros((RING_UNITS, HEADER_WORDS + MAX_MEMBERS * MEMBER_WORDS), np.uint32)
        self._told = np.zeros(TOLD_WORDS, np.uint32)
        super().__init__(table, {layer: layer for layer in LAYERS}, words, self._told)
        self.launched_ns: list[int] = []

    def replay(self) -> None:
        """Launch a graph."""
        self.launched_ns.append(time.perf_counter_ns())

    def finish_one(self) -> None:
        """As the last kernel of a unit does."""
        self._told[0] += 1

    def pull(self, bucket: int) -> Any:
        """See `UnitExchange`."""
        raise AssertionError("there is a graph for each number of rows")

    push: Any = pull


class Attention:
    """One attached server; its kernels' writes to the doorbell page are done here."""

    def __init__(self, slab: HostSlab, link: CudaIpcLink) -> None:
        self.slab, self.link = slab, link
        self._page = mmap.mmap(slab.fds[1], layout.DOORBELL_BYTES)
        self._seq = 0

    def ring(self, step: int, layer_id: int) -> None:
        """The rows of a layer are in slot 0."""
        self._seq += 1
        epoch = self.link.epoch
        words = (self._seq, self._seq, epoch & 0xFFFFFFFF, epoch >> 32, step, 0, layer_id, 0, ROWS)
        ring = (*words, layout.KINDS.index(Kind.DECODE), 1)
        line = np.array((*ring, layout.sum_of_ring(ring)), np.uint32).tobytes()
        self._page[4 : len(line)] = line[4:]
        self._page[:4] = line[:4]

    def announce(self, step: int) -> None:
        """Tell rank 0 of a step, as the scheduler does."""
        self.link.announce(
            StepIntent(
                epoch=self.link.epoch,
                step=step,
                num_rows=ROWS,
                num_micro_batches=1,
                kind=Kind.DECODE,
            )
        )


class HostSide:
    """A loop that serves `attns`."""

    def __init__(self, directory: Path, num_peers: int, *, rehearses: bool) -> None:
        spec = make_spec(
            transport="cuda_ipc",
            hidden_size=2048,
            top_k=8,
            num_experts=128,
            moe_layer_ids=LAYERS,
            max_rows=1024,
        )
        self.table = HostTable()
        self.device = StubDevice(self.table)
        gate = Gate(make_identity(spec), b"", max_peers=8)
        options = HubOptions(
            listen=f"ipc://{directory}/exchange",
            heartbeat_timeout_s=LIMIT_S,
            max_peers=8,
            device=0,
            with_rows=False,
        )
        self.hub = CudaIpcHub(gate, options, door=f"{directory}/door", table=self.table)
        buckets = RowBuckets(DEFAULT_GRAPH_ROWS, 1024)
        graphs = {(layer, rows): self.device for layer in LAYERS for rows in buckets.captured}
        experts: Any = None  # every launch is a graph
        self.loop = DeviceLoop(
            self.hub,
            DeviceUnits(self.device, experts, buckets, graphs),
            Board(128),
            make_rank_order(self.hub.order, LAYERS, rank=0, ep_size=1),
            lambda: False,
            predictor=Predictor(LAYERS),
            rehearsal=Rehearsal(time.perf_counter_ns) if rehearses else None,
        )
        self.attns = [self._attach(f"attn-{number}", spec) for number in range(num_peers)]

    def _attach(self, server_id: str, spec: Any) -> Attention:
        slab = HostSlab(shape_of(spec, num_slots=2, max_ranks=1))
        options = LinkOptions(
            server_id=server_id,
            spec=spec,
            secret=b"",
            heartbeat_timeout_s=LIMIT_S,
            stall_timeout_s=LIMIT_S,
            handshake_timeout_s=LIMIT_S,
        )
        links: list[CudaIpcLink] = []
        thread = threading.Thread(
            target=lambda: links.append(CudaIpcLink([self.hub.address], options, slab))
        )
        thread.start()
        deadline_s = time.monotonic() + LIMIT_S
        while thread.is_alive() and time.monotonic() < deadline_s:
            self.loop.turn()
        return Attention(slab, links[0])

    def close(self) -> None:
        """Free everything."""
        for attn in self.attns:
            attn.link.close()
            attn.link.close_watch()
        self.hub.close()
        for attn in self.attns:
            attn.slab.close()


@contextlib.contextmanager
def host_side(directory: Path, num_peers: int, *, rehearses: bool = True) -> Iterator[HostSide]:
    """Attached servers and their loop."""
    side = HostSide(directory, num_peers, rehearses=rehearses)
    try:
        yield side
    finally:
        side.close()


def quantiles_us(times_ns: Sequence[int]) -> tuple[float, float]:
    """Half and nine tenths of some times are below."""
    half, most = np.quantile(np.array(times_ns), (0.5, 0.9)) / 1e3
    return round(float(half), 1), round(float(most), 1)
