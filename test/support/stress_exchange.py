"""Three processes that exchange rows as servers do, as fast as they can, and check every value.

`python stress_exchange.py mlp --rank R` serves one of two ranks and prints its address; `python
stress_exchange.py attn ADDRESS ADDRESS` decodes and prefills, and prints one JSON line for each
session. What ranks make of rows is arithmetic whose result is known to the last bit.

A rank is a process of its own, as servers are: in one process, streams share the GPU's queues, and
a rank that waits for rows would hold up the other one, whose reply those rows need.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from peers import make_identity, make_spec
from torch import Tensor

from sglang_afd.protocol.handshake import Gate
from sglang_afd.protocol.messages import Dispatch, Kind, ModelSpec
from sglang_afd.transport.base import Arrived, PeerAttached, PeerGone, Rows
from sglang_afd.transport.cuda_ipc.hub import CudaIpcHub, HubOptions
from sglang_afd.transport.cuda_ipc.layout import EVERY_ROW, WaitPolicy, shape_of
from sglang_afd.transport.cuda_ipc.link import CudaIpcLink
from sglang_afd.transport.cuda_ipc.slab import Slab
from sglang_afd.transport.cuda_ipc.unit_ring import UnitMemberRef
from sglang_afd.transport.cuda_ipc.units import UnitExchange
from sglang_afd.transport.zmq_link import LinkOptions

SEED = 20_261_130
NUM_RANKS = 2
LAYER_IDS = (1, 2, 4)
MAX_ROWS = 384
NUM_EXPERTS = 16
SPEC: ModelSpec = make_spec(
    transport="cuda_ipc",
    dtype="bfloat16",
    dispatch_dtype="bfloat16",
    hidden_size=512,
    top_k=4,
    num_experts=NUM_EXPERTS,
    moe_layer_ids=LAYER_IDS,
    max_rows=MAX_ROWS,
)
RUN_AHEAD = 6  # units enqueued and not done
POOL_ROWS = 4096
PREFILL_SHARE = 0.1
STEPS_AHEAD = 8  # of the attention side's host
FAULTS = ("none", "shifted", "other_share", "reversed")


def weigh(rows: Rows, layer_id: int, first_expert: int) -> Tensor:
    """Each choice of this rank adds (id + 1) times its weight times the layer's number.

    Weights are multiples of 1/8 and ids small, so nothing but the rounding of the product with a
    hidden state loses a bit, whatever the order of additions.
    """
    ids, weights = rows.topk_ids, rows.topk_weights
    factors = torch.where(ids >= 0, (ids + 1 + first_expert) * weights, 0.0)
    total = factors.sum(1, keepdim=True) * (1 + LAYER_IDS.index(layer_id))
    return (rows.hidden_states.float() * total).to(rows.hidden_states.dtype)


# ---- attention side ----


@dataclass
class Pool:
    """Rows to send, and what must come back of them for each layer."""

    rows: Rows
    sums: dict[int, Tensor]
    choices_before: list[int]  # valid ones in all rows before a row

    def at(self, first: int, number: int) -> Rows:
        """Some of the rows."""
        part = slice(first, first + number)
        return Rows(
            hidden_states=self.rows.hidden_states[part],
            topk_ids=self.rows.topk_ids[part],
            topk_weights=self.rows.topk_weights[part],
        )


def make_pool() -> Pool:
    """Random rows, and their sums without any exchange."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (POOL_ROWS, SPEC.top_k)
    states = torch.randn(POOL_ROWS, SPEC.hidden_size, generator=generator).bfloat16()
    ids = torch.randint(-1, NUM_EXPERTS, shape, dtype=torch.int32, generator=generator)
    weights = torch.randint(1, 9, shape, generator=generator).float() / 8
    rows = Rows(hidden_states=states.cuda(), topk_ids=ids.cuda(), topk_weights=weights.cuda())
    before = [0, *torch.cumsum((ids >= 0).sum(1), 0).tolist()]
    return Pool(rows=rows, sums={i: _sum(rows, i) for i in LAYER_IDS}, choices_before=before)


def _sum(rows: Rows, layer_id: int) -> Tensor:
    each, total = (
        NUM_EXPERTS // NUM_RANKS,
        torch.zeros_like(rows.hidden_states, dtype=torch.float32),
    )
    for rank in range(NUM_RANKS):
        local = rows.topk_ids - rank * each
        ours = torch.where((local >= 0) & (local < each), local, -1)
        share = Rows(
            hidden_states=rows.hidden_states, topk_ids=ours, topk_weights=rows.topk_weights
        )
        total += weigh(share, layer_id, rank * each).float()
    return total.bfloat16()


@dataclass(frozen=True)
class Step:
    """One forward: where the rows of each micro-batch begin in the pool, and how many there are."""

    number: int
    kind: Kind
    parts: tuple[tuple[int, int], ...]


def steps(num_exchanges: int, seed: int) -> Iterator[Step]:
    """Random steps with so many exchanges or a few more."""
    source, done, number = random.Random(seed), 0, 0
    while done < num_exchanges:
        number += 1
        kind = Kind.PREFILL if source.random() < PREFILL_SHARE else Kind.DECODE
        most = MAX_ROWS if kind is Kind.PREFILL else 64
        sizes = [source.randint(1, most) for _ in range(source.randint(1, 2))]
        parts = tuple((source.randint(0, POOL_ROWS - size), size) for size in sizes)
        yield Step(number=number, kind=kind, parts=parts)
        done += len(parts) * len(LAYER_IDS)


class Session:
    """Steps over one slab; what is wrong is counted on the device."""

    def __init__(self, pool: Pool, slab: Slab) -> None:
        self._pool = pool
        self._slab = slab
        self._wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self._events = [torch.cuda.Event() for _ in range(STEPS_AHEAD)]
        self.num_exchanges = 0
        self.num_rows = 0
        self.num_choices = 0

    def run(self, num_exchanges: int, seed: int) -> int:
        """Returns how many values were not what they had to be."""
        for step in steps(num_exchanges, seed):
            event = self._events[step.number % STEPS_AHEAD]
            event.synchronize()
            self._step(step)
            event.record()
        return int(self._wrong.item())

    def _step(self, step: Step) -> None:
        self._slab.stage_step(
            step=step.number,
            kind=step.kind,
            num_micro_batches=len(step.parts),
            num_rows=EVERY_ROW,
        )
        for layer_id in LAYER_IDS:
            for slot, (first, number) in enumerate(step.parts):
                rows = self._pool.at(first, number)
                self._slab.dispatch(
                    slot,
                    layer_id,
                    rows.hidden_states,
                    rows.topk_ids,
                    rows.topk_weights,
                    rings=True,
                )
            for slot, (first, number) in enumerate(step.parts):
                got = self._slab.combine(slot, number)
                wanted = self._pool.sums[layer_id][first : first + number]
                self._wrong += (got != wanted).sum()
                self.num_exchanges += 1
                self.num_rows += number
                before = self._pool.choices_before
                self.num_choices += before[first + number] - before[first]


def attend(addresses: Sequence[str], num_exchanges: int, num_faulty: int) -> None:
    """Sessions of each policy without a fault, then short ones with one."""
    pool = make_pool()
    shape = shape_of(SPEC, num_slots=2, max_ranks=NUM_RANKS)
    for policy in WaitPolicy:
        slab = Slab(shape, 0, policy)
        for fault in FAULTS if policy is WaitPolicy.POLL else FAULTS[:1]:
            number = num_exchanges if fault == "none" else num_faulty
            link = _attach(addresses, f"{policy.value}.{fault}", slab)
            watcher = threading.Thread(target=_watch, args=(link, slab))
            watcher.start()
            session, started_s = Session(pool, slab), time.monotonic()
            wrong = session.run(number, seed=SEED + list(WaitPolicy).index(policy))
            took_s = time.monotonic() - started_s
            lost = link.lost
            link.close()
            watcher.join()
            if lost is not None:
                raise SystemExit(f"{policy.value}.{fault}: {lost}")
            slab.detach()
            line = {
                "side": "attn",
                "session": f"{policy.value}.{fault}",
                "wrong_values": wrong,
                "num_exchanges": session.num_exchanges,
                "num_rows": session.num_rows,
                "num_choices": session.num_choices,
                "seconds": round(took_s, 2),
            }
            print(json.dumps(line), flush=True)


def _watch(link: CudaIpcLink, slab: Slab) -> None:
    """Nothing waits for ranks that went."""
    while link.watch(0.2):
        pass
    while not link.is_closed:
        if link.lost is not None:
            slab.abort()
        time.sleep(0.05)
    link.close_watch()


def _attach(addresses: Sequence[str], server_id: str, slab: Slab) -> CudaIpcLink:
    options = LinkOptions(
        server_id=server_id,
        spec=SPEC,
        secret=b"",
        heartbeat_timeout_s=30.0,
        stall_timeout_s=60.0,
        handshake_timeout_s=60.0,
    )
    return CudaIpcLink(addresses, options, slab)


# ---- MLP side ----


@dataclass
class Serving:
    """One attention server at one rank."""

    server_id: str
    index: int
    waiting: dict[tuple[int, int], dict[int, Dispatch]] = field(default_factory=dict)

    @property
    def fault(self) -> str:
        """What this rank does wrong on purpose."""
        return self.server_id.partition(".")[2]


class ServingRank:
    """One rank: a hub, units on a stream of its own, and a host that runs ahead of them."""

    def __init__(self, rank: int, directory: str) -> None:
        identity = make_identity(SPEC, rank=rank, ep_size=NUM_RANKS)
        options = HubOptions(
            listen=f"ipc://{directory}/{rank}",
            heartbeat_timeout_s=30.0,
            max_peers=4,
            device=0,
            with_rows=False,
        )
        self.hub = CudaIpcHub(
            Gate(identity, b"", max_peers=4), options, door=f"{directory}/door-{rank}"
        )
        self._rank = rank
        self._first_expert = identity.first_expert
        self.units = UnitExchange(
            self.hub.table,
            hidden_size=SPEC.hidden_size,
            top_k=SPEC.top_k,
            dtype=torch.bfloat16,
            first_expert=identity.first_expert,
            stop_expert=identity.stop_expert,
            layer_ids=LAYER_IDS,
            max_unit_rows=MAX_ROWS,
        )
        self.hub.watch_units(self.units)
        self._stream = torch.cuda.Stream()
        self._random = random.Random(SEED + rank)
        self._serving: dict[bytes, Serving] = {}
        self._due: list[tuple[Serving, int, Dispatch, bool]] = []  # layer, header, in pieces
        self.num_left = 0

    def warm_up(self) -> None:
        """Load every kernel and take memory; either could have to wait for a kernel that waits."""
        with torch.cuda.stream(self._stream):
            for fault in FAULTS:
                rows = Rows(
                    hidden_states=self.units.hidden_states,
                    topk_ids=self.units.topk_ids,
                    topk_weights=self.units.topk_weights,
                )
                partial = weigh(rows, LAYER_IDS[0], self._first_expert)
                self._spoil(fault, partial, MAX_ROWS)
                self.units.expert_counts.sum()
        torch.cuda.synchronize()

    def turn(self) -> None:
        """Take what came, and enqueue what is due as far as the device keeps up."""
        for event in self.hub.poll(0.0):
            match event:
                case PeerAttached(peer=peer, server_id=server_id):
                    index = self.hub.peer_index(peer)
                    assert index is not None
                    self._serving[peer] = Serving(server_id, index)
                case PeerGone(peer=peer):
                    self._leave(self._serving.pop(peer))
                case Arrived(exchange=exchange):
                    self._arrived(self._serving[exchange.peer], exchange.header)
                case _:
                    pass
        while self._due and self.units.num_submitted - self.units.num_done < RUN_AHEAD:
            self._serve(*self._due.pop(0))

    def _arrived(self, serving: Serving, header: Dispatch) -> None:
        if header.kind is Kind.PREFILL:
            self._due.append((serving, header.layer_id, header, True))
            return
        if header.layer_id != LAYER_IDS[0]:
            return  # served already, before it came
        parts = serving.waiting.setdefault((header.epoch, header.step), {})
        parts[header.micro_batch_id] = header
        if len(parts) == header.num_micro_batches:
            del serving.waiting[(header.epoch, header.step)]
            for layer_id in LAYER_IDS:
                for slot in sorted(parts):
                    self._due.append((serving, layer_id, parts[slot], False))

    def _serve(self, serving: Serving, layer_id: int, header: Dispatch, in_pieces: bool) -> None:
        whole = header.num_rows
        cut = self._random.randint(0, whole - 1) if in_pieces and whole > 1 else 0
        pieces = [(0, cut), (cut, whole - cut)] if cut else [(0, whole)]
        member = UnitMemberRef(peer_index=serving.index, slot=header.micro_batch_id, num_rows=whole)
        for first_row, number in pieces:
            bucket = min(MAX_ROWS, -(-number // 32) * 32)  # rows beyond the unit's are padding
            while self.units.num_submitted - self.units.num_done > RUN_AHEAD:
                pass
            with torch.cuda.stream(self._stream):
                self.units.submit(
                    layer_id,
                    [member],
                    first_row=first_row,
                    num_rows=number,
                    is_last_piece=first_row + number == whole,
                )
                rows = self.units.pull(bucket)
                partial = weigh(rows, layer_id, self._first_expert)
                self.units.push(self._spoil(serving.fault, partial, bucket), bucket)

    def _spoil(self, fault: str, partial: Tensor, bucket: int) -> Tensor:
        if fault == "shifted" and self._rank == 1:
            return partial.roll(1, 0)
        if fault == "other_share" and self._rank == 1:
            return weigh(
                Rows(
                    hidden_states=self.units.hidden_states[:bucket],
                    topk_ids=self.units.topk_ids[:bucket],
                    topk_weights=self.units.topk_weights[:bucket],
                ),
                LAYER_IDS[0],
                0,
            )
        if fault == "reversed":
            return partial.flip(1)
        return partial

    def _leave(self, serving: Serving) -> None:
        self._stream.synchronize()
        line = {
            "side": f"mlp-{self._rank}",
            "session": serving.server_id,
            "num_choices": int(self.units.expert_counts.sum().item()),
            "num_units": self.units.num_submitted,
            "error": self.units.error,
        }
        self.units.expert_counts.zero_()
        torch.cuda.synchronize()
        self.num_left += 1
        print(json.dumps(line), flush=True)


def serve(number: int, num_sessions: int) -> None:
    """One rank, until so many attention servers have come and gone."""
    with tempfile.TemporaryDirectory(prefix="afd-stress-") as directory:
        rank = ServingRank(number, directory)
        rank.warm_up()
        print(json.dumps({"address": rank.hub.address}), flush=True)
        while rank.num_left < num_sessions:
            rank.turn()
        rank.hub.close()


def main(argv: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["attn", "mlp"])
    parser.add_argument("addresses", nargs="*")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--exchanges", type=int, default=100_000)
    parser.add_argument("--faulty-exchanges", type=int, default=300)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds, then stacks are shown")
    options = parser.parse_args(argv)
    # What hangs, hangs in a call of CUDA's, where no other thread of Python would say so.
    faulthandler.dump_traceback_later(options.limit, exit=True)
    torch.cuda.set_device(0)
    if options.side == "attn":
        attend(options.addresses, options.exchanges, options.faulty_exchanges)
    else:
        serve(options.rank, len(FAULTS) + 1)
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
