"""What a server and a client see through the router is what they would see without it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from raw_http import Fields, Message, ask, post
from raw_server import RawServer, Talk
from relay_corpus import ANSWERS, PASSED_ON, of_case
from router_harness import RouterProcess

pytestmark = pytest.mark.multiproc

# Everything that the router may change in a request. The rest must be equal, byte for byte.
HOP = {  # end at the router
    *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"x-hop"),
    *(b"upgrade", b"http2-settings"),
}
FRAMING = {b"content-length", b"transfer-encoding"}  # the same body may be framed anew
ANSWERED = {b"expect"}  # by the router itself
ITS_OWN = {b"host"}  # the server's address may stand there
ADDED_WHEN_MISSING = b"x-request-id"
# And in a response: an added one names the router's request.
ADDED_TO_RESPONSES = {b"x-request-id", b"date", b"server"}


@dataclass(frozen=True)
class Compared:
    """What must be equal."""

    start: tuple[bytes, ...]
    fields: Fields
    body: bytes


def _request(seen: Message, *, may_add: bool) -> Compared:
    left_out = HOP | FRAMING | ANSWERED | ITS_OWN | ({ADDED_WHEN_MISSING} if may_add else set())
    return Compared(seen.start[:2], _without(seen.fields, left_out), seen.body)


def _response(got: Message, added: set[bytes]) -> Compared:
    # 304 tells the length of a body that it does not have.
    left_out = HOP | added | (FRAMING if got.status != 304 else set())
    return Compared(got.start[1:], _without(got.fields, left_out), got.body)


def _without(fields: Fields, names: set[bytes]) -> Fields:
    return [(name, value) for name, value in fields if name.lower() not in names]


@pytest.mark.parametrize("name", PASSED_ON)
def test_a_server_sees_the_request_that_it_would_see_without_the_router(
    relay: RouterProcess, raw_server: RawServer, name: str
) -> None:
    request = of_case(name)
    first = len(raw_server.of_case(name))

    without = ask(raw_server.address, request)
    through = ask(relay.address, request)

    direct, relayed = raw_server.of_case(name)[first:]
    may_add = not direct.values("x-request-id")
    assert _request(relayed, may_add=may_add) == _request(direct, may_add=may_add)
    assert (through.status, through.body) == (without.status, without.body) and through.is_whole


def test_a_request_without_an_id_gets_one_that_the_client_can_read(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    replies = [ask(relay.address, post("/generate?case=ids")) for _ in range(2)]

    ids = [request.values("x-request-id") for request in raw_server.of_case("ids")]
    assert [len(each) for each in ids] == [1, 1] and ids[0] != ids[1]
    assert [reply.values("x-request-id") for reply in replies] == ids


@pytest.mark.parametrize("name", ANSWERS)
def test_a_client_sees_the_response_that_it_would_see_without_the_router(
    relay: RouterProcess, raw_server: RawServer, name: str
) -> None:
    scripted = ANSWERS[name]

    async def answer(talk: Talk) -> None:
        for piece in scripted.pieces:
            await talk.send(piece)
        if scripted.ends:
            talk.close()

    raw_server.scripts[name.encode()] = answer
    request = post(f"/generate?answer={name}")

    without = ask(raw_server.address, request)
    through = ask(relay.address, request)

    added = {each for each in ADDED_TO_RESPONSES if not without.values(each.decode())}
    assert _response(through, added) == _response(without, added)
    assert through.is_whole


def test_nothing_that_the_router_sent_was_malformed(
    relay: RouterProcess, raw_server: RawServer
) -> None:
    for name in PASSED_ON:
        ask(relay.address, of_case(name))

    assert raw_server.malformed == []
