"""One server against routers that listen on real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from registering import FakeRouter, Server, fake_router, lease_of

from sglang_afd.errors import PeerLost
from sglang_afd.protocol.registration import (
    Condition,
    Decline,
    DeclineCode,
    FromRouter,
    Leave,
    Registration,
    Renewal,
    ToRouter,
)
from sglang_afd.protocol.signature import is_signed
from sglang_afd.registrar.registrar import Registrar
from sglang_afd.registrar.told import ToldPage

SECRET = b"s" * 32


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with fake_router() as router:
        yield router


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def registrar_of(
    server: Server, *urls: str, secret: bytes = b"", told: ToldPage | None = None
) -> tuple[Registrar, Clock]:
    clock = Clock()
    return (
        Registrar(server.describe, urls=urls, secret=secret, told=told or ToldPage(), clock=clock),
        clock,
    )


def test_a_server_registers_renews_and_leaves(router: FakeRouter) -> None:
    registrar, clock = registrar_of(Server(), router.url)

    registrar.turn()
    registrar.turn()
    clock.now_s += 2.0
    registrar.turn()
    registrar.leave()

    assert router.kinds() == ["Registration", "Renewal", "Leave"]


def test_what_the_router_says_is_shown(router: FakeRouter) -> None:
    told = ToldPage()
    registrar, _ = registrar_of(Server(), router.url, told=told)
    router.answer = lambda message: lease_of(
        mlp_urls=("http://127.0.0.1:1",), reason="waits", is_draining=True, may_stop=True
    )

    registrar.turn()

    assert told.read().urls == ("http://127.0.0.1:1",)
    assert registrar.status() == {
        "url": router.url,
        "is_registered": True,
        "lease_id": "router-1",
        "heard_ago_s": 0.0,
        "group": "group-1",
        "epoch": 3,
        "reason": "waits",
        "is_draining": True,
        "may_stop": True,
        "last_error": "",
    }
    assert registrar.is_draining and registrar.may_stop is True


def test_what_a_router_says_of_an_older_epoch_is_not_shown(router: FakeRouter) -> None:
    told = ToldPage()
    registrar, clock = registrar_of(Server(), router.url, told=told)
    router.answer = lambda message: lease_of(mlp_urls=("http://127.0.0.1:1",))
    registrar.turn()
    router.answer = lambda message: lease_of(mlp_urls=("http://127.0.0.1:2",), epoch=2)
    clock.now_s += 2.0

    registrar.turn()

    assert told.read().urls == ("http://127.0.0.1:1",)
    assert "epoch 2" in str((registrar.status() or {})["last_error"])


def test_every_message_is_signed_where_there_is_a_secret(router: FakeRouter) -> None:
    registrar, clock = registrar_of(Server(), router.url, secret=SECRET)

    registrar.turn()
    clock.now_s += 2.0
    registrar.turn()
    registrar.leave()

    assert len(router.signatures) == 3
    assert all(is_signed(SECRET, body, value) for body, value in router.signatures)


def test_without_a_secret_nothing_is_signed(router: FakeRouter) -> None:
    registrar, _ = registrar_of(Server(), router.url)

    registrar.turn()

    assert router.signatures[0][1] == ""


def test_the_next_router_is_tried_and_asked_first_from_then_on(
    router: FakeRouter, nobody: str
) -> None:
    registrar, clock = registrar_of(Server(), nobody, router.url)

    registrar.turn()

    assert router.kinds() == ["Registration"]
    assert (registrar.status() or {})["url"] == router.url
    clock.now_s += 2.0
    registrar.turn()
    assert router.kinds() == ["Registration", "Renewal"]


def test_where_no_router_answers_the_server_goes_on_and_says_so(nobody: str) -> None:
    told = ToldPage()
    registrar, _ = registrar_of(Server(), nobody, told=told)

    registrar.turn()

    status = registrar.status() or {}
    assert not status["is_registered"]
    assert f"no router answers at {nobody}" in status["last_error"]
    assert nobody in told.read().reason


@pytest.mark.parametrize("status", [400, 403, 404, 500])
def test_an_answer_that_is_none_of_ours_is_told_with_its_status(
    router: FakeRouter, status: int
) -> None:
    registrar, _ = registrar_of(Server(), router.url)
    router.answer = lambda message: status

    registrar.turn()

    assert f"/afd/v1/servers answers {status}" in (registrar.status() or {})["last_error"]


def test_a_router_that_forgot_everything_is_registered_with_again(router: FakeRouter) -> None:
    registrar, clock = registrar_of(Server(), router.url)
    registrar.turn()
    known: list[ToRouter] = []

    def forget(message: ToRouter) -> FromRouter:
        if isinstance(message, Renewal):
            return Decline(code=DeclineCode.UNKNOWN_LEASE, message="register again")
        known.append(message)
        return lease_of(lease_id="router-2")

    router.answer = forget
    clock.now_s += 2.0

    registrar.turn()
    registrar.turn()

    assert router.kinds() == ["Registration", "Renewal", "Registration"]
    assert isinstance(known[0], Registration)
    assert (known[0].group, known[0].epoch) == ("group-1", 3)
    assert (registrar.status() or {})["lease_id"] == "router-2"


def test_nothing_is_sent_while_the_server_knows_too_little(router: FakeRouter) -> None:
    registrar = Registrar(lambda: None, urls=[router.url], secret=b"", told=ToldPage())

    registrar.turn()

    assert router.messages == []
    assert registrar.registration() is None


def test_a_router_that_asks_is_told_what_one_that_is_registered_with_would_hear() -> None:
    registrar, _ = registrar_of(Server())

    first = msgspec.json.decode(registrar.registration() or b"")
    second = msgspec.json.decode(registrar.registration() or b"")

    assert (first["type"], first["server_id"]) == ("register", "attn-0")
    assert second["report"]["seq"] == first["report"]["seq"] + 1
    assert registrar.status() is None


def test_the_thread_tells_news_at_once_and_says_goodbye(router: FakeRouter) -> None:
    server = Server()
    registrar = Registrar(server.describe, urls=[router.url], secret=b"", told=ToldPage())
    router.answer = lambda message: lease_of(renew_s=1000.0, ttl_s=3000.0)
    registrar.start()
    router.wait_for(lambda messages: len(messages) == 1)

    server.standing = replace(server.standing, condition=Condition.STALLED, reason="gone")
    router.wait_for(lambda messages: len(messages) == 2)
    registrar.drain()
    router.wait_for(lambda messages: len(messages) == 3)
    registrar.stop()

    stalled, draining, last = router.messages[1:]
    assert isinstance(stalled, Renewal) and stalled.report.condition is Condition.STALLED
    assert isinstance(draining, Renewal) and draining.report.is_draining
    assert isinstance(last, Leave)


def test_an_error_of_ours_does_not_end_the_thread(router: FakeRouter) -> None:
    server, calls = Server(), []

    def describe() -> object:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("a bug")
        return server.describe()

    registrar = Registrar(describe, urls=[router.url], secret=b"", told=ToldPage())  # type: ignore[arg-type]
    registrar.start()

    router.wait_for(lambda messages: len(messages) == 1)
    registrar.stop()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 address ::1")
def test_a_router_at_an_ipv6_address_is_reached() -> None:
    with fake_router("::1") as router:
        registrar, _ = registrar_of(Server(), router.url)
        registrar.turn()

    assert router.kinds() == ["Registration"]


def test_the_goodbye_to_a_router_that_is_gone_is_no_error() -> None:
    sent: list[ToRouter] = []

    def send(url: str, message: ToRouter, secret: bytes) -> FromRouter:
        sent.append(message)
        if len(sent) > 1:
            raise PeerLost("gone")
        return lease_of()

    registrar = Registrar(
        Server().describe, urls=["http://h:1"], secret=b"", told=ToldPage(), send=send
    )
    registrar.turn()

    registrar.leave()

    assert [type(message) for message in sent] == [Registration, Leave]
