"""Whoever can connect to an exchange address can send anything; an attached link goes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random

import pytest
import torch
import zmq
from peers import SPEC, hello, make_header
from traffic import SEED, exchange, rows_to
from transports import PATIENCE_S, Fleet, Rank, ReferenceExperts
from zmq.utils.monitor import parse_monitor_message

from sglang_afd.protocol import codec
from sglang_afd.protocol.messages import Attach, Challenge, Refusal, RefusalCode, ToAttn
from sglang_afd.transport.base import PeerAttached, PeerGone

EXPERTS = ReferenceExperts(SPEC, 1, SEED)


class Stranger:
    """A raw socket that has read the source code."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def answer(self) -> ToAttn:
        assert self._socket.poll(PATIENCE_S * 1000)
        return codec.decode_to_attn(self._socket.recv_multipart()[0])

    def wait_until_thrown_out(self) -> None:
        assert self._monitor.poll(PATIENCE_S * 1000)
        assert parse_monitor_message(self._monitor.recv_multipart())["event"]

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close(0)
        self._monitor.close(0)
        self._context.term()


@pytest.fixture
def rank(zmq_fleet: Fleet) -> Rank:
    """A rank that serves."""
    return zmq_fleet.start(SPEC, EXPERTS.run)[0]


@pytest.fixture
def stranger(rank: Rank) -> Iterator[Stranger]:
    """Connected to the rank, and not attached."""
    stranger = Stranger(rank.hub.address)
    yield stranger
    stranger.close()


@contextmanager
def undisturbed(fleet: Fleet) -> Iterator[None]:
    link, rows = fleet.attach(SPEC), rows_to(SPEC, 3)
    assert torch.equal(exchange(link, rows), EXPERTS.expected(1, rows))

    yield

    assert torch.equal(exchange(link, rows), EXPERTS.expected(1, rows))
    [rank] = fleet.ranks
    assert (rank.count(PeerAttached), rank.count(PeerGone)) == (1, 0)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b"garbage"], "does not begin with the sglang-afd mark"),
        ([b""], "does not begin with the sglang-afd mark"),
        ([b"", b"", b""], "does not begin with the sglang-afd mark"),
        ([b"x" * codec.MAX_CONTROL_BYTES], "does not begin with the sglang-afd mark"),
        ([b"AFD\x01\x80"], "peer speaks protocol version 1, this side speaks 3; install"),
        ([b"AFD\x03\xff\xff"], "control frame does not parse"),
        ([codec.encode(Challenge(nonce=b"", proof=b""))], "does not parse: Invalid value"),
        ([codec.encode(hello(server_id=""))], "1 to 64 letters"),
        (
            [codec.encode(Attach(spec=SPEC, epoch=0, proof=b"", follower_rank=-1))],
            "attach without a hello",
        ),
    ],
)
def test_garbage_is_refused_and_says_why(
    zmq_fleet: Fleet, stranger: Stranger, frames: list[bytes], message: str
) -> None:
    with undisturbed(zmq_fleet):
        stranger.send(*frames)
        answer = stranger.answer()

    assert isinstance(answer, Refusal)
    assert answer.code == RefusalCode.PROTOCOL
    assert message in answer.message


def test_rows_of_a_stranger_are_refused(zmq_fleet: Fleet, stranger: Stranger) -> None:
    with undisturbed(zmq_fleet):
        stranger.send(codec.encode(make_header()), b"", b"", b"")
        answer = stranger.answer()

    assert isinstance(answer, Refusal)
    assert answer.code == RefusalCode.NOT_ATTACHED


def test_a_hello_without_knowledge_of_a_secret_gets_no_further(
    zmq_fleet: Fleet, stranger: Stranger
) -> None:
    with undisturbed(zmq_fleet):
        stranger.send(codec.encode(hello()))
        challenge = stranger.answer()
        stranger.send(codec.encode(Attach(spec=SPEC, epoch=0, proof=b"p" * 32, follower_rank=-1)))
        answer = stranger.answer()

    assert isinstance(challenge, Challenge)
    assert isinstance(answer, Refusal)
    assert answer.code == RefusalCode.SECRET


def test_an_oversized_frame_ends_its_connection_before_it_is_read(
    zmq_fleet: Fleet, stranger: Stranger
) -> None:
    with undisturbed(zmq_fleet):
        stranger.send(b"x" * (codec.MAX_CONTROL_BYTES + 1))
        stranger.wait_until_thrown_out()


def test_a_flood_is_refused_message_by_message(zmq_fleet: Fleet, stranger: Stranger) -> None:
    num_messages = 600  # more than one turn of the hub takes

    with undisturbed(zmq_fleet):
        for number in range(num_messages):
            stranger.send(b"%d" % number)
        answers = [stranger.answer() for _ in range(num_messages)]

    assert all(isinstance(answer, Refusal) for answer in answers)


def connect_plainly(address: str) -> socket.socket:
    scheme, place = address.split("://")
    if scheme == "ipc":
        plain = socket.socket(socket.AF_UNIX)
        plain.connect(place)
        return plain
    host, port = place.rsplit(":", 1)
    return socket.create_connection((host, int(port)))


def test_a_client_of_another_protocol_is_thrown_out(zmq_fleet: Fleet, rank: Rank) -> None:
    with undisturbed(zmq_fleet), connect_plainly(rank.hub.address) as plain:
        plain.settimeout(PATIENCE_S)
        plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64))
        with suppress(ConnectionResetError):  # instead of an end, where some of it was not read
            while plain.recv(1024):
                pass


def test_port_scanners_do_not_take_along_who_gets_their_descriptor(zmq_fleet: Fleet) -> None:
    """The hub learns of the scans and of the newcomer in one turn."""
    [rank] = zmq_fleet.start(SPEC, EXPERTS.run)
    rank.hold_polls()
    for scan in [connect_plainly(rank.hub.address) for _ in range(64)]:
        scan.close()
    timer = threading.Timer(0.3, rank.release_polls)  # long enough for the hello to arrive
    timer.start()

    link = zmq_fleet.attach(SPEC)
    timer.join()

    rows = rows_to(SPEC, 3)
    assert torch.equal(exchange(link, rows), EXPERTS.expected(1, rows))
    assert (rank.count(PeerAttached), rank.count(PeerGone)) == (1, 0)


def test_random_bytes_on_raw_connections_disturb_nobody(zmq_fleet: Fleet, rank: Rank) -> None:
    random = Random(SEED)
    old_protocol = b"\x01\x00\x02\x00A"  # a whole message of ZMTP 1.0, which has no descriptor
    with undisturbed(zmq_fleet):
        for junk in (old_protocol, *(random.randbytes(2000) for _ in range(100))):
            with suppress(OSError), connect_plainly(rank.hub.address) as plain:
                plain.sendall(junk)
