"""SIGTERM of an attention server: the router first, then SGLang's own end."""

from __future__ import annotations

import threading

from registering import FakeRouter, Server, fake_router, lease_of

from sglang_afd.attn.open_requests import OpenRequests
from sglang_afd.attn.server import Ending
from sglang_afd.protocol.registration import Lease, Leave, Renewal, ToRouter
from sglang_afd.registrar.registrar import Registrar
from sglang_afd.registrar.told import ToldPage


def answer(message: ToRouter) -> Lease:
    is_draining = isinstance(message, Renewal) and message.report.is_draining
    return lease_of(is_draining=is_draining, may_stop=is_draining)


def registered(router: FakeRouter) -> Registrar:
    router.answer = answer
    registrar = Registrar(Server().describe, urls=[router.url], secret=b"", told=ToldPage())
    registrar.start()
    router.wait_for(lambda messages: len(messages) >= 1)
    return registrar


def test_requests_end_and_the_server_leaves_before_sglang_ends() -> None:
    has_ended, open_requests = threading.Event(), OpenRequests()
    with fake_router() as router:
        ending = Ending(registered(router), open_requests, 30.0)
        with open_requests.one():
            ending.begin(has_ended.set)
            ending.begin(has_ended.set)
            router.wait_for(has_drained)
            assert not has_ended.wait(0.7)

        assert has_ended.wait(20)

    assert isinstance(router.messages[-1], Leave)
    assert router.kinds().count("Leave") == 1


def test_a_request_that_takes_too_long_does_not_hold_the_end_up() -> None:
    has_ended, open_requests = threading.Event(), OpenRequests()
    with fake_router() as router, open_requests.one():
        Ending(registered(router), open_requests, 0.1).begin(has_ended.set)

        assert has_ended.wait(20)

    assert isinstance(router.messages[-1], Leave)


def has_drained(messages: list[ToRouter]) -> bool:
    return any(isinstance(one, Renewal) and one.report.is_draining for one in messages)
