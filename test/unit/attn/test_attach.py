from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from peers import SECRET, SPEC

from sglang_afd.attn import attach
from sglang_afd.attn.attach import Attacher
from sglang_afd.attn.status import StatusBoard
from sglang_afd.errors import ConfigError, PeerLost, StallTimeout
from sglang_afd.transport.server_info import ServerInfo, fetch_info
from sglang_afd.transport.zmq_link import LinkOptions, ZmqLink

INFO: dict[str, Any] = {
    "role": "mlp",
    "ep_rank": 0,
    "missing_ranks": [],
    "group": [
        {"rank": 0, "exchange_address": "tcp://0.0.0.0:7000"},
        {"rank": 1, "exchange_address": "ipc:///run/1"},
    ],
}


MAIN, SPARE = "http://127.0.0.1:30010", "http://10.0.0.5:30010"


def find(monkeypatch: pytest.MonkeyPatch, info: dict[str, Any], secret: bytes = b"") -> list[str]:
    return find_among(monkeypatch, {MAIN: info}, secret)


def find_among(
    monkeypatch: pytest.MonkeyPatch, infos: dict[str, dict[str, Any] | None], secret: bytes = b""
) -> list[str]:
    """With an answer for each address, or None where nothing answers."""

    def answer(url: str) -> ServerInfo:
        if (info := infos[url]) is None:
            raise PeerLost(f"no MLP server answers at {url}: nobody")
        return msgspec.convert(info, ServerInfo)

    monkeypatch.setattr(attach, "fetch_info", answer)
    options = LinkOptions(
        server_id="attn-0",
        spec=SPEC,
        secret=secret,
        heartbeat_timeout_s=1.0,
        stall_timeout_s=1.0,
    )
    return Attacher(
        ",".join(url + "/" for url in infos), options, StatusBoard(), connect=ZmqLink
    )._find()


def test_every_rank_is_found_where_this_host_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(monkeypatch, INFO) == ["tcp://127.0.0.1:7000", "ipc:///run/1"]


def test_a_server_of_another_role_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is not an MLP server; .* --role mlp"):
        find(monkeypatch, {"model_path": "m"})


def test_a_rank_that_does_not_lead_is_refused_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="is MLP rank 1; give the address of rank 0"):
        find(monkeypatch, {"role": "mlp", "ep_rank": 1})


def test_a_group_with_missing_ranks_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerLost, match=r"rank\(s\) \[1\] of the group of .* do not serve yet"):
        find(monkeypatch, INFO | {"missing_ranks": [1]})


NOT_WHOLE: list[dict[str, Any] | None] = [
    None,
    {"role": "mlp", "state": "spare"},
    {"role": "mlp", "ep_rank": 1},
    {"model_path": "m"},
    INFO | {"missing_ranks": [0]},
    INFO | {"group": [{"rank": 0, "exchange_address": "loopback"}]},
]


@pytest.mark.parametrize("other", NOT_WHOLE)
def test_the_first_address_that_leads_a_whole_group_is_taken(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any] | None
) -> None:
    group = INFO | {"group": [{"rank": 0, "exchange_address": "tcp://0.0.0.0:7001"}]}

    assert find_among(monkeypatch, {SPARE: other, MAIN: INFO}) == [
        "tcp://127.0.0.1:7000",
        "ipc:///run/1",
    ]
    assert find_among(monkeypatch, {SPARE: group, MAIN: INFO}, SECRET) == ["tcp://10.0.0.5:7001"]


def test_where_no_address_leads_all_are_named_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(PeerLost) as caught:
        find_among(monkeypatch, {MAIN: None, SPARE: {"role": "mlp", "state": "spare"}})

    assert str(caught.value) == (
        f"no MLP server answers at {MAIN}: nobody; the MLP server at {SPARE} is a spare that waits"
    )


def test_an_address_that_can_never_lead_is_no_reason_to_end_while_another_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(PeerLost, match=r"is MLP rank 1; .*; no MLP server answers at"):
        find_among(monkeypatch, {SPARE: {"role": "mlp", "ep_rank": 1}, MAIN: None})


def test_addresses_that_can_never_lead_are_refused_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"is not an MLP server; .*; --afd-mlp .* is MLP rank 1"):
        find_among(monkeypatch, {MAIN: {}, SPARE: {"role": "mlp", "ep_rank": 1}})


def test_a_rank_on_another_host_needs_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    info = INFO | {"group": [{"rank": 0, "exchange_address": "tcp://10.0.0.5:7000"}]}

    with pytest.raises(ConfigError, match=r"the exchange address tcp://10\.0\.0\.5:7000 can be"):
        find(monkeypatch, info)
    assert find(monkeypatch, info, SECRET) == ["tcp://10.0.0.5:7000"]


def test_an_address_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    info = INFO | {"group": [{"rank": 0, "exchange_address": "loopback"}]}

    with pytest.raises(ConfigError, match="exchange address loopback is neither"):
        find(monkeypatch, info)


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A socket that says `answer` to the first request and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def _ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n",
        b"",
        b"HTTP/1.1 500 Oh\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        _ok(b"no json"),
        _ok(b"[1]"),
        _ok(b'{"role": 3}'),
        _ok(b'{"role": "mlp", "group": [1]}'),
        _ok(b'{"role": "mlp", "group": [{"rank": "0", "exchange_address": null}]}'),
        _ok(b"[" * 100_000),
    ],
)
def test_any_other_answer_counts_as_no_server(answer: bytes) -> None:
    with answering(answer) as url, pytest.raises(PeerLost, match="MLP server"):
        fetch_info(url)


def test_fields_that_are_not_known_are_ignored() -> None:
    with answering(_ok(b'{"role": "mlp", "ep_rank": 1, "new": {}}')) as url:
        assert fetch_info(url) == ServerInfo(role="mlp", ep_rank=1)


class Link:
    """As far as the attacher looks at one."""

    ranks = ()

    def __init__(self, epoch: int, lost: str | None = None) -> None:
        self.epoch, self.lost = epoch, lost


def test_a_link_that_was_lost_before_anybody_took_it_begins_no_step() -> None:
    options = LinkOptions(
        server_id="attn-0",
        spec=SPEC,
        secret=b"",
        heartbeat_timeout_s=1.0,
        stall_timeout_s=0.01,
    )
    attacher: Attacher[Any] = Attacher(MAIN, options, StatusBoard(), connect=lambda *_: None)
    living = Link(2)
    attacher._attached(Link(1, lost="a step was given up"))

    with pytest.raises(StallTimeout), attacher.use():
        attacher.take(waiting_since_s=time.monotonic(), limit_s=math.inf)
    attacher._attached(living)

    with attacher.use():
        taken = attacher.take(waiting_since_s=time.monotonic(), limit_s=math.inf)
    assert taken is living


class LivingLink(Link):
    """One that watches as long as it is not lost."""

    is_closed = False
    num_watches = 0

    def watch(self, timeout_s: float) -> bool:
        time.sleep(0.002)
        self.num_watches += 1
        return self.lost is None and not self.is_closed

    def mark_lost(self, reason: str) -> None:
        self.lost = reason

    def close(self) -> None:
        self.is_closed = True

    def close_watch(self) -> None:
        return None


def told_attacher(
    monkeypatch: pytest.MonkeyPatch,
    infos: dict[str, dict[str, Any] | None],
    connect: Any = lambda *_: None,
    secret: bytes = b"",
) -> tuple[Attacher[Any], StatusBoard]:
    """One without --afd-mlp, among servers that answer so."""

    def answer(url: str) -> ServerInfo:
        if (info := infos[url]) is None:
            raise PeerLost(f"no MLP server answers at {url}: nobody")
        return msgspec.convert(info, ServerInfo)

    monkeypatch.setattr(attach, "fetch_info", answer)
    monkeypatch.setattr(attach, "RETRY_S", 0.002)
    monkeypatch.setattr(attach, "MOVE_S", 0.002)
    options = LinkOptions(
        server_id="attn-0",
        spec=SPEC,
        secret=secret,
        heartbeat_timeout_s=1.0,
        stall_timeout_s=1.0,
    )
    board = StatusBoard()
    return Attacher("", options, board, connect=connect), board


FIRST, SECOND = "http://127.0.0.1:30010", "http://127.0.0.1:30020"
ALONE = INFO | {"group": [{"rank": 0, "exchange_address": "ipc:///run/0"}]}
ALONE_TOO = INFO | {"group": [{"rank": 0, "exchange_address": "ipc:///run/other"}]}


def test_without_an_address_the_router_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    attacher, board = told_attacher(monkeypatch, {})
    board.told.write(urls=(), reason="no MLP server of its model has registered")

    with pytest.raises(PeerLost, match="has named no MLP servers yet: no MLP server of its model"):
        attacher._find()


def test_the_mlp_servers_are_found_where_the_router_says(monkeypatch: pytest.MonkeyPatch) -> None:
    attacher, board = told_attacher(monkeypatch, {FIRST: None, SECOND: ALONE})
    board.told.write(urls=(FIRST, SECOND), reason="")

    assert attacher._find() == ["ipc:///run/0"]


def test_a_wrong_address_of_the_router_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    attacher, board = told_attacher(monkeypatch, {FIRST: {"model_path": "m"}})
    board.told.write(urls=(FIRST,), reason="")

    with pytest.raises(PeerLost, match="is not an MLP server"):
        attacher._find()


def test_the_router_cannot_send_a_server_without_a_secret_to_another_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attacher, board = told_attacher(monkeypatch, {SPARE: ALONE})
    board.told.write(urls=(SPARE,), reason="")

    with pytest.raises(PeerLost, match="10.0.0.5.* can be reached from other hosts"):
        attacher._find()


def moving(
    monkeypatch: pytest.MonkeyPatch, infos: dict[str, dict[str, Any] | None]
) -> tuple[Attacher[Any], StatusBoard, list[list[str]], threading.Semaphore]:
    """Attached to FIRST."""
    places: list[list[str]] = []
    news = threading.Semaphore(0)

    def connect(addresses: list[str], _: LinkOptions) -> LivingLink:
        places.append(addresses)
        news.release()
        return LivingLink(len(places))

    attacher, board = told_attacher(monkeypatch, infos, connect)
    board.told.write(urls=(FIRST,), reason="")
    attacher.start()
    assert news.acquire(timeout=20)
    return attacher, board, places, news


def test_a_server_moves_when_the_router_names_others_that_are_all_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attacher, board, places, news = moving(monkeypatch, {FIRST: ALONE, SECOND: ALONE_TOO})

    board.told.write(urls=(SECOND,), reason="")

    assert news.acquire(timeout=20)
    attacher.close()
    assert places == [["ipc:///run/0"], ["ipc:///run/other"]]


def test_a_server_stays_while_the_others_are_not_all_there_or_its_own_are_still_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    infos: dict[str, dict[str, Any] | None] = {FIRST: ALONE, SECOND: None}
    asked: list[str] = []
    attacher, board, places, _ = moving(monkeypatch, infos)
    answer = attach.fetch_info
    monkeypatch.setattr(attach, "fetch_info", lambda url: (asked.append(url), answer(url))[1])
    wait_until(lambda: attacher._fresh is not None)
    link = attacher._fresh

    board.told.write(urls=(SECOND,), reason="")
    wait_until(lambda: asked.count(SECOND) >= 3)
    board.told.write(urls=(SECOND, FIRST), reason="")
    look_on(link)  # a look that began before may still ask the second
    infos[SECOND] = ALONE_TOO
    look_on(link)
    attacher.close()

    assert (link.lost, places) == (None, [["ipc:///run/0"]])


def look_on(link: LivingLink) -> None:
    """Until the attacher has begun and ended several looks at the link and at the router's word."""
    before = link.num_watches
    wait_until(lambda: link.num_watches >= before + 8 or link.lost is not None)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
