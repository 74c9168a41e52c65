from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest
from descriptors import num_open

from sglang_afd.errors import PeerLost, ProtocolError
from sglang_afd.transport.cuda_ipc import fds

Pair = tuple[socket.socket, socket.socket]


def memory(name: str, content: bytes) -> int:
    fd = os.memfd_create(name)
    os.write(fd, content)
    return fd


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of one connection."""
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_a_message_and_what_lies_behind_its_descriptors_arrive(pair: Pair) -> None:
    one, other = pair
    mine = [memory("afd-a", b"slots"), memory("afd-b", b"doorbells")]

    fds.send(one, b"hello", mine)
    parcel = fds.receive(other, num_fds=2, timeout_s=5.0)

    assert parcel.body == b"hello"
    assert [os.pread(fd, 100, 0) for fd in parcel.fds] == [b"slots", b"doorbells"]
    assert not any(os.get_inheritable(fd) for fd in parcel.fds)
    parcel.close()
    fds.close_all(mine)
    assert num_open("afd-a") == num_open("afd-b") == 0


def test_a_message_without_descriptors_arrives_in_pieces(pair: Pair) -> None:
    one, other = pair
    for byte in struct.pack("!I", 3) + b"abc":
        one.send(bytes([byte]))

    assert fds.receive(other, num_fds=0, timeout_s=5.0) == fds.Parcel(body=b"abc", fds=())


@pytest.mark.parametrize("num_fds", [0, 2])
def test_more_descriptors_than_wanted_are_refused_and_none_stays_open(
    pair: Pair, num_fds: int
) -> None:
    one, other = pair
    mine = [memory("afd-many", b"") for _ in range(num_fds + 1)]
    fds.send(one, b"hello", mine)
    fds.close_all(mine)

    with pytest.raises(ProtocolError, match=f"more than {num_fds} file descriptors"):
        fds.receive(other, num_fds=num_fds, timeout_s=5.0)

    one.close(), other.close()
    assert num_open("afd-many") == 0


def test_descriptors_in_a_second_piece_count_too(pair: Pair) -> None:
    one, other = pair
    mine = [memory("afd-split", b"") for _ in range(2)]
    socket.send_fds(one, [struct.pack("!I", 2)], mine)
    socket.send_fds(one, [b"ab"], mine)
    fds.close_all(mine)

    with pytest.raises(ProtocolError, match="more than 2 file descriptors"):
        fds.receive(other, num_fds=2, timeout_s=5.0)

    assert num_open("afd-split") == 0


def test_a_message_beyond_the_bound_is_not_read(pair: Pair) -> None:
    one, other = pair
    fd = memory("afd-long", b"")
    socket.send_fds(one, [struct.pack("!I", fds.MAX_PARCEL_BYTES + 1)], [fd])
    os.close(fd)

    with pytest.raises(ProtocolError, match="of 4097 bytes came over a Unix socket; at most 4096"):
        fds.receive(other, num_fds=2, timeout_s=5.0)

    assert num_open("afd-long") == 0


def test_silence_ends_the_wait_and_closes_what_came(pair: Pair) -> None:
    one, other = pair
    fd = memory("afd-silent", b"")
    socket.send_fds(one, [struct.pack("!I", 4) + b"ab"], [fd])
    os.close(fd)

    with pytest.raises(PeerLost, match="timed out"):
        fds.receive(other, num_fds=2, timeout_s=0.1)

    assert num_open("afd-silent") == 0


def test_an_end_that_was_closed_is_no_message(pair: Pair) -> None:
    one, other = pair
    one.close()

    with pytest.raises(PeerLost, match="was closed"):
        fds.receive(other, num_fds=2, timeout_s=5.0)
    with pytest.raises(PeerLost, match="could not be sent"):
        fds.send(other, b"hello")


def test_the_kernel_tells_whose_the_other_end_is(pair: Pair) -> None:
    assert fds.user_of(pair[0]) == os.getuid()
