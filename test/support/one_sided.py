"""Both sides of the one-sided exchange in one process, on two streams of one GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglang_afd.protocol.messages import Dispatch, Kind
from sglang_afd.transport.cuda_ipc.layout import EVERY_ROW, SlabShape, WaitPolicy
from sglang_afd.transport.cuda_ipc.peer_table import PeerTable
from sglang_afd.transport.cuda_ipc.slab import Slab
from sglang_afd.transport.cuda_ipc.unit_ring import UnitMemberRef
from sglang_afd.transport.cuda_ipc.units import UnitExchange

NUM_EXPERTS = 16
LAYER_IDS = (3, 4, 7)
PATIENCE_S = 20.0

Inputs = tuple[Tensor, Tensor, Tensor]


def make_shape(dtype: str = "bfloat16", **changes: int | bool) -> SlabShape:
    """A small slab."""
    sizes = {"num_slots": 2, "max_ranks": 2, "max_rows": 64, "hidden_size": 256, "top_k": 4}
    return SlabShape(**(sizes | changes), dtype=dtype)


def make_rows(shape: SlabShape, num_rows: int, seed: int) -> Inputs:
    """Hidden states, ids and weights on the GPU, some choices -1."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
    states = torch.randn(num_rows, shape.hidden_size, generator=generator, device="cuda")
    ids = torch.randint(
        -1, NUM_EXPERTS, (num_rows, shape.top_k), generator=generator, device="cuda"
    )
    weights = torch.rand(num_rows, shape.top_k, generator=generator, device="cuda")
    return states.to(dtype), ids.int(), weights


class Rank:
    """One MLP rank; `experts` stands in for the model, and may be all that a graph can hold."""

    def __init__(
        self,
        shape: SlabShape,
        experts: Callable[[Tensor, Tensor, Tensor], Tensor],
        *,
        rank: int = 0,
        num_ranks: int = 1,
        max_unit_rows: int = 256,
        max_peers: int = 8,
    ) -> None:
        self.table = PeerTable(max_peers=max_peers, rank=rank, device=0)
        each = NUM_EXPERTS // num_ranks
        self.exchange = UnitExchange(
            self.table,
            hidden_size=shape.hidden_size,
            top_k=shape.top_k,
            dtype=getattr(torch, shape.dtype),
            first_expert=rank * each,
            stop_expert=(rank + 1) * each,
            layer_ids=LAYER_IDS,
            max_unit_rows=max_unit_rows,
        )
        self.stream = torch.cuda.Stream()
        self._experts = experts

    def open(self, slab: Slab, epoch: int) -> int:
        """Map a slab; the link is the caller's."""
        return self.table.open(slab.fds, slab.shape, epoch)

    def heard(self, index: int) -> Sequence[Dispatch]:
        """Wait until a doorbell of this peer has rung."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not (headers := self.table.rung(index)):
            if time.monotonic() > deadline_s:
                raise AssertionError("no doorbell rang")
        return headers

    def run(self, bucket: int) -> None:
        """What one unit consists of; on the current stream, so that it can be captured."""
        rows = self.exchange.pull(bucket)
        partial = self._experts(rows.hidden_states, rows.topk_ids, rows.topk_weights)
        self.exchange.push(partial, bucket)

    def serve(self, layer_id: int, members: Sequence[UnitMemberRef], bucket: int) -> int:
        """Submit and launch one unit on this rank's stream."""
        with torch.cuda.stream(self.stream):
            ticket = self.exchange.submit(layer_id, members)
            self.run(bucket)
        return ticket


def member(index: int, slot: int, num_rows: int) -> UnitMemberRef:
    """One exchange of a unit."""
    return UnitMemberRef(peer_index=index, slot=slot, num_rows=num_rows)


def attached_slab(
    shape: SlabShape, ranks: Sequence[Rank], policy: WaitPolicy = WaitPolicy.POLL, epoch: int = 5
) -> tuple[Slab, list[int]]:
    """A slab that every rank has mapped; returns its index at each of them."""
    slab = Slab(shape, 0, policy)
    indices = [rank.open(slab, epoch) for rank in ranks]
    slab.attach(epoch, len(ranks))
    return slab, indices


def send(slab: Slab, slot: int, layer_id: int, inputs: Inputs, *, step: int = 1) -> None:
    """Stage a step and dispatch it on the current stream."""
    slab.stage_step(step=step, kind=Kind.DECODE, num_micro_batches=1, num_rows=EVERY_ROW)
    slab.dispatch(slot, layer_id, *inputs, rings=True)


def weigh(states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """An expert sum that is plain to check: each choice of ours adds (id + 1) times its weight."""
    factors = torch.where(ids >= 0, (ids + 1) * weights, 0.0).sum(1, keepdim=True)
    return (states.float() * factors).to(states.dtype)


def reference(inputs: Inputs, *, rank: int = 0, num_ranks: int = 1) -> Tensor:
    """What `weigh` makes of rows on one rank, without any exchange."""
    states, ids, weights = inputs
    each = NUM_EXPERTS // num_ranks
    local = ids - rank * each
    return weigh(states, torch.where((local >= 0) & (local < each), local, -1), weights)
