"""Requests that were spoilt at random, the same ones for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from relay_corpus import PASSED_ON, REFUSED, of_case

MAX_SEED_BYTES = 6000  # of what is spoilt
WHOLE = 0.75  # share that was well-formed before
TROUBLE = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"\x0b", b"\x7f", b"\xff", b'"'),
    *(b"\r\n\r\n", b"\r\n ", b"0\r\n\r\n", b"Content-Length: 3\r\n", b"Content-Length: -1\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n"),
    *(b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Connection: upgrade\r\n"),
    *(b"Upgrade: websocket\r\n", b"Host: other\r\n", b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0"),
    *(b"POST /generate HTTP/1.1\r\n", b"GET ", b"99999999999999999999", b"ffffffffffffffff"),
)
Mutation = Callable[[random.Random, bytearray], None]


def spoilt(number: int, seed: int = 0) -> list[bytes]:
    """`number` requests, spoilt in one to three places each."""
    draw = random.Random(seed)
    whole = [data for data in map(of_case, PASSED_ON) if len(data) <= MAX_SEED_BYTES]
    bad = [each.data for each in REFUSED.values() if len(each.data) <= MAX_SEED_BYTES]
    made: list[bytes] = []
    for _ in range(number):
        data = bytearray(draw.choice(whole if draw.random() < WHOLE else bad))
        for _ in range(draw.randint(1, 3)):
            draw.choice(MUTATIONS)(draw, data)
        if draw.random() < 0.2:
            data += draw.choice(draw.choice((whole, bad)))
        made.append(bytes(data))
    return made


def _place(draw: random.Random, data: bytearray) -> int:
    # The head is where most can go wrong.
    end = data.find(b"\r\n\r\n")
    limit = end + 4 if end >= 0 and draw.random() < 0.7 else len(data)
    return draw.randrange(limit + 1) if limit else 0


def _flip(draw: random.Random, data: bytearray) -> None:
    if data:
        at = min(_place(draw, data), len(data) - 1)
        data[at] ^= 1 << draw.randrange(8)


def _insert(draw: random.Random, data: bytearray) -> None:
    at = _place(draw, data)
    data[at:at] = draw.choice(TROUBLE)


def _insert_at_a_line(draw: random.Random, data: bytearray) -> None:
    at = data.find(b"\r\n", _place(draw, data))
    if at >= 0:
        data[at + 2 : at + 2] = draw.choice(TROUBLE)


def _replace(draw: random.Random, data: bytearray) -> None:
    at = _place(draw, data)
    trouble = draw.choice(TROUBLE)
    data[at : at + len(trouble)] = trouble


def _delete(draw: random.Random, data: bytearray) -> None:
    at = _place(draw, data)
    del data[at : at + draw.choice((1, 1, 2, 5, 40))]


def _double(draw: random.Random, data: bytearray) -> None:
    at = _place(draw, data)
    piece = bytes(data[at : at + draw.choice((1, 2, 10, 60))])
    data[at:at] = piece


def _double_a_line(draw: random.Random, data: bytearray) -> None:
    start = data.find(b"\r\n", _place(draw, data))
    end = data.find(b"\r\n", start + 2)
    if 0 <= start < end:
        data[start:start] = data[start:end]


def _cut(draw: random.Random, data: bytearray) -> None:
    del data[_place(draw, data) :]


MUTATIONS: tuple[Mutation, ...] = (
    *(_flip, _insert, _insert, _insert_at_a_line, _insert_at_a_line, _replace),
    *(_delete, _double, _double_a_line, _cut),
)
