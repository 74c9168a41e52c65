"""Attaching with slots: real sockets, descriptors and doorbells, and no GPU behind them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from descriptors import num_open
from host_slots import HostSlab, HostTable
from peers import make_identity, make_spec

from sglang_afd.errors import ConfigError, ExchangeFailed, PeerLost, Refused
from sglang_afd.protocol.handshake import Gate
from sglang_afd.protocol.messages import (
    Attached,
    Kind,
    ModelSpec,
    OpenSlots,
    RefusalCode,
    StepIntent,
)
from sglang_afd.transport.base import Announced, Arrived, Event, PeerAttached, PeerGone
from sglang_afd.transport.cuda_ipc.door import bring
from sglang_afd.transport.cuda_ipc.hub import CudaIpcHub, HubOptions
from sglang_afd.transport.cuda_ipc.layout import shape_of
from sglang_afd.transport.cuda_ipc.link import CudaIpcLink, open_slots
from sglang_afd.transport.zmq_hub import ZmqHub
from sglang_afd.transport.zmq_link import LinkOptions, ZmqLink

SPEC = make_spec(transport="cuda_ipc", hidden_size=128, num_experts=8)
PATIENCE_S = 30.0


class Ranks:
    """Hubs on threads, which keep what they were told; and slabs and links to them."""

    def __init__(self, directory: Path, num_ranks: int, spec: ModelSpec = SPEC) -> None:
        self.hubs: list[CudaIpcHub] = []
        self.tables = [HostTable(rank) for rank in range(num_ranks)]
        self.events: list[list[Event]] = [[] for _ in range(num_ranks)]
        self.threads: list[threading.Thread] = []
        self.slabs: list[HostSlab] = []
        self.links: list[CudaIpcLink] = []
        self.is_over = threading.Event()
        self.may_poll = threading.Lock()
        self.actions: list[Callable[[CudaIpcHub], object]] = []
        for rank in range(num_ranks):
            identity = make_identity(spec, rank=rank, ep_size=num_ranks)
            options = HubOptions(
                listen=f"ipc://{directory}/{rank}",
                heartbeat_timeout_s=30.0,
                max_peers=4,
                device=0,
                with_rows=False,
            )
            gate = Gate(identity, b"", max_peers=4)
            door = f"{directory}/door-{rank}"
            self.hubs.append(CudaIpcHub(gate, options, door=door, table=self.tables[rank]))
            self.threads.append(threading.Thread(target=self._serve, args=(rank,)))
            self.threads[rank].start()

    def _serve(self, rank: int) -> None:
        while not self.is_over.is_set():
            with self.may_poll:
                events = self.hubs[rank].poll(0.002)
                while rank == 0 and self.actions:
                    events += self.actions.pop()(self.hubs[rank]) or []
            self.events[rank] += events

    def attach(
        self, server_id: str = "attn-0", spec: ModelSpec = SPEC, slab: HostSlab | None = None
    ) -> CudaIpcLink:
        slab = slab or self.slab(spec)
        options = LinkOptions(
            server_id=server_id,
            spec=spec,
            secret=b"",
            heartbeat_timeout_s=30.0,
            stall_timeout_s=PATIENCE_S,
            handshake_timeout_s=PATIENCE_S,
        )
        link = CudaIpcLink([hub.address for hub in self.hubs], options, slab)
        self.links.append(link)
        return link

    def slab(self, spec: ModelSpec = SPEC, **changes: int) -> HostSlab:
        sizes = {"num_slots": 2, "max_ranks": 3} | changes
        self.slabs.append(HostSlab(shape_of(spec, **sizes)))
        return self.slabs[-1]

    def wait_for(self, kind: type[Event], number: int = 1, rank: int = 0) -> list[Event]:
        def found() -> list[Event]:
            return [event for event in self.events[rank] if isinstance(event, kind)]

        wait_until(lambda: len(found()) >= number)
        return found()

    def close(self) -> None:
        for link in self.links:
            link.close()
            link.close_watch()
        self.is_over.set()
        for thread, hub in zip(self.threads, self.hubs, strict=True):
            thread.join(PATIENCE_S)
            hub.close()
        for slab in self.slabs:
            slab.close()


def wait_until(is_so: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """A group of two."""
    ranks = Ranks(tmp_path, 2)
    yield ranks
    ranks.close()


def names(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_every_rank_has_mapped_the_slots_when_the_link_is_there(ranks: Ranks) -> None:
    link = ranks.attach()

    [slab] = ranks.slabs
    assert [table.contents for table in ranks.tables] == [[b"slots"], [b"slots"]]
    assert (slab.epoch, slab.num_ranks) == (link.epoch, 2)
    for rank in range(2):
        [event] = ranks.wait_for(PeerAttached, rank=rank)
        assert (event.server_id, event.epoch) == ("attn-0", link.epoch)
        assert ranks.hubs[rank].peer_index(event.peer) == 0
    wait_until(lambda: num_open("afd-slab") == 1)  # our own; each rank has closed its copy


def test_a_doorbell_is_an_arrival_with_its_header(ranks: Ranks) -> None:
    link = ranks.attach()

    ranks.slabs[0].put(1, step=7, layer_id=3, num_rows=5)

    for rank in range(2):
        [arrived] = ranks.wait_for(Arrived, rank=rank)
        header = arrived.exchange.header
        assert (header.epoch, header.step, header.layer_id) == (link.epoch, 7, 3)
        assert (header.micro_batch_id, header.num_rows, header.kind) == (1, 5, Kind.DECODE)
        assert names(ranks.events[rank]) == ["PeerAttached", "Arrived"]


def test_what_is_pending_arrives_again_under_the_next_epoch_and_once(ranks: Ranks) -> None:
    slab = ranks.slab()
    first = ranks.attach(slab=slab)
    slab.put(0)
    ranks.wait_for(Arrived)
    first.mark_lost("test")

    second = ranks.attach(slab=slab)

    for rank in range(2):
        ranks.wait_for(Arrived, 2, rank=rank)
        epochs = [e.exchange.header.epoch for e in ranks.events[rank] if isinstance(e, Arrived)]
        assert epochs == [first.epoch, second.epoch]


def test_the_older_session_of_a_server_is_left_before_the_next_begins(ranks: Ranks) -> None:
    slab = ranks.slab()
    ranks.attach(slab=slab)

    ranks.attach(slab=slab)

    ranks.wait_for(PeerAttached, 2)
    assert names(ranks.events[0]) == ["PeerAttached", "PeerGone", "PeerAttached"]
    assert ranks.tables[0].dead == [0]
    wait_until(lambda: ranks.tables[0].closed == [0])


def test_servers_that_go_are_marked_dead_and_their_slots_unmapped(ranks: Ranks) -> None:
    link = ranks.attach()

    link.close()

    [gone] = ranks.wait_for(PeerGone)
    assert gone.reason == "detached"
    assert ranks.hubs[0].peer_index(gone.peer) is None
    wait_until(lambda: ranks.tables[0].closed == [0])


def test_announcements_go_over_zeromq(ranks: Ranks) -> None:
    link = ranks.attach()
    intent = StepIntent(epoch=link.epoch, step=4, num_rows=2, num_micro_batches=1, kind=Kind.DECODE)

    link.announce(intent)

    [announced] = ranks.wait_for(Announced)
    assert announced.message == intent


def test_who_passes_the_handshake_and_brings_no_slots_is_not_told_of(ranks: Ranks) -> None:
    options = LinkOptions(
        server_id="attn-0",
        spec=SPEC,
        secret=b"",
        heartbeat_timeout_s=30.0,
        stall_timeout_s=1.0,
    )
    bare = ZmqLink([hub.address for hub in ranks.hubs], options)
    bare.close()
    bare.close_watch()

    ranks.attach("attn-1")

    ranks.wait_for(PeerAttached)
    assert names(ranks.events[0]) == ["PeerAttached"]


def message_to(ranks: Ranks, **changes: object) -> tuple[Attached, OpenSlots]:
    """A handshake is passed; what to say at the door, with changes."""
    options = LinkOptions(
        server_id="attn-0",
        spec=SPEC,
        secret=b"",
        heartbeat_timeout_s=30.0,
        stall_timeout_s=1.0,
    )
    link = ZmqLink([hub.address for hub in ranks.hubs], options)
    ranks.links.append(link)  # type: ignore[arg-type]
    message = open_slots("attn-0", link.epoch, ranks.slab().shape)
    return link.ranks[0], msgspec.structs.replace(message, **changes)


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        ({"epoch": 99}, RefusalCode.EPOCH, "came under epoch 99, which nobody of that name"),
        ({"server_id": "other"}, RefusalCode.EPOCH, "slots of other came under epoch"),
        ({"max_rows": 6}, RefusalCode.MODEL, r"\(6, 128, 2, 'float32', False\); the handshake"),
        ({"is_fp8": True}, RefusalCode.MODEL, "'float32', True"),
        ({"num_slots": 5}, RefusalCode.MODEL, "5 slots; 1 to 4 fit"),
        ({"dtype": "int8"}, RefusalCode.MODEL, "dtype int8 is none of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_slots_that_do_not_fit_are_refused_and_closed(
    ranks: Ranks, changes: dict[str, object], code: RefusalCode, told: str
) -> None:
    answer, message = message_to(ranks, **changes)

    with pytest.raises(Refused, match=told) as caught:
        bring(answer.door, message, ranks.slabs[0].fds, timeout_s=PATIENCE_S)

    assert caught.value.code == code
    assert ranks.hubs[0].num_refused == 1
    assert ranks.tables[0].contents == []
    assert num_open("afd-slab") == 1


def test_a_doorbell_page_that_is_too_small_is_refused(ranks: Ranks) -> None:
    answer, message = message_to(ranks)
    [slab] = ranks.slabs
    os.ftruncate(slab.fds[1], 100)

    with pytest.raises(Refused, match="doorbells need 4096 bytes, got 100"):
        bring(answer.door, message, slab.fds, timeout_s=PATIENCE_S)

    os.ftruncate(slab.fds[1], 4096)


@pytest.mark.parametrize("wrong", [{"layer_id": 2}, {"num_rows": 6}, {"num_rows": 0}])
def test_a_server_whose_doorbell_lies_is_sent_away(ranks: Ranks, wrong: dict[str, int]) -> None:
    link = ranks.attach()

    ranks.slabs[0].put(0, **wrong)

    [gone] = ranks.wait_for(PeerGone)
    assert "a doorbell tells of an exchange that cannot be" in gone.reason
    wait_until(lambda: not link.watch(0.01))
    assert "a doorbell tells" in (link.lost or "")


def test_a_declined_exchange_ends_the_session_and_says_that_it_failed(ranks: Ranks) -> None:
    link = ranks.attach()
    ranks.slabs[0].put(0)
    [arrived] = ranks.wait_for(Arrived)

    ranks.actions.append(
        lambda hub: hub.decline(arrived.exchange, RefusalCode.EXPERT, "out of memory")
    )
    [gone] = ranks.wait_for(PeerGone)
    wait_until(lambda: not link.watch(0.01))

    assert gone.reason == "out of memory"
    assert link.lost == "MLP rank 0 declined an exchange: out of memory"
    with pytest.raises(ExchangeFailed, match="out of memory"):
        link.raise_if_lost()


def test_a_server_that_is_sent_away_hears_it_from_its_watch(ranks: Ranks) -> None:
    link = ranks.attach()

    ranks.actions.append(lambda hub: hub.expel("MLP rank(s) [1] went away"))
    ranks.wait_for(PeerGone)
    wait_until(lambda: not link.watch(0.01))

    assert "MLP rank 0 knows us no longer: MLP rank(s) [1] went away" in (link.lost or "")
    with pytest.raises(PeerLost, match="went away"):
        link.raise_if_lost()


def test_a_group_with_more_ranks_than_the_slots_have_room_for_is_refused(ranks: Ranks) -> None:
    slab = ranks.slab(max_ranks=1)

    with pytest.raises(ConfigError, match="2 MLP ranks, .* laid out for 1; .*--afd-max-mlp-ranks"):
        ranks.attach(slab=slab)

    assert ranks.events[0] == []


def test_a_door_that_is_shut_loses_the_attachment_and_leaves_nothing(ranks: Ranks) -> None:
    ranks.hubs[1]._door.close()

    with pytest.raises(PeerLost, match="door .* is closed"):
        ranks.attach()

    ranks.wait_for(PeerGone)
    assert names(ranks.events[0]) == ["PeerAttached", "PeerGone"]
    wait_until(lambda: num_open("afd-slab") == 1)


def test_transports_that_differ_are_refused_with_the_flag(ranks: Ranks) -> None:
    told = "attention server has zmq, the MLP server has cuda_ipc; .* same --afd-transport"

    with pytest.raises(Refused, match=told):
        ranks.attach(spec=make_spec(hidden_size=128, num_experts=8, transport="zmq"))


def test_a_rank_without_a_door_gets_no_slots(tmp_path: Path) -> None:
    gate = Gate(make_identity(SPEC), b"", max_peers=4)
    hub = ZmqHub(gate, f"ipc://{tmp_path}/zmq", heartbeat_timeout_s=30.0)
    is_over = threading.Event()
    thread = threading.Thread(target=lambda: [hub.poll(0.01) for _ in iter(is_over.is_set, True)])
    thread.start()
    slab = HostSlab(shape_of(SPEC, num_slots=1, max_ranks=1))
    options = LinkOptions(
        server_id="attn-0",
        spec=SPEC,
        secret=b"",
        heartbeat_timeout_s=30.0,
        stall_timeout_s=1.0,
    )

    try:
        with pytest.raises(Refused, match="rank 0 takes rows over ZeroMQ, this attention server"):
            CudaIpcLink([hub.address], options, slab)
    finally:
        is_over.set()
        thread.join(PATIENCE_S)
        hub.close()
        slab.close()
