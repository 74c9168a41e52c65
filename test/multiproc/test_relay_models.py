"""Requests go to servers of the model that they name, by the tables of a control process."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from raw_http import Client, Message, ask, chunk, post
from raw_server import DONE, SSE_HEAD, RawServer, Script, Talk, answer_ok, event, wait_until
from relay_corpus import line
from relay_rig import CONTROL_ANSWER, RelayRig, row, table

from sgl_router_afd.control.standing import Standing
from sgl_router_afd.dataplane import counters
from sgl_router_afd.dataplane.messages import UNPLACED, BrokeOff, ModelRow, Unreachable
from sgl_router_afd.keys import Key

pytestmark = pytest.mark.multiproc

KEY = "the-key-of-clients"
KEPT_BYTES = 64 * 1024
LARGE = b"x" * (3 * KEPT_BYTES)
TOO_LARGE = b"x" * (17 * KEPT_BYTES)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[RawServer, RawServer]]:
    with RawServer() as one, RawServer() as other:
        yield one, other


@pytest.fixture
def gone() -> Iterator[RawServer]:
    """Where nobody listens."""
    with RawServer() as server:
        server.stop()
        yield server


@pytest.fixture(scope="module")
def rig() -> Iterator[RelayRig]:
    with RelayRig(hold_timeout_s=3600, max_replay_body_bytes=KEPT_BYTES) as rig:
        yield rig


@pytest.fixture
def two_models(rig: RelayRig, servers: tuple[RawServer, RawServer]) -> RelayRig:
    """Model a at the first server, model b at the second."""
    rig.publish(
        table(
            [row(0, servers[0]), row(1, servers[1])],
            {"a": ModelRow(slots=(0,)), "b": ModelRow(slots=(1,))},
        )
    )
    return rig


@pytest.fixture
def two_servers(rig: RelayRig, servers: tuple[RawServer, RawServer]) -> RelayRig:
    """One model at both."""
    both = ModelRow(slots=(0, 1))
    rig.publish(table([row(0, servers[0]), row(1, servers[1])], {"a": both}, unnamed=both))
    return rig


def _named(model: str, target: str = "/v1/completions") -> bytes:
    return post(target, json.dumps({"prompt": "p", "model": model}).encode())


def _from(reply: Message) -> int:
    assert reply.status == 200, reply.body
    port: int = json.loads(reply.body)["answer_of"]
    return port


def _error(reply: Message) -> dict[str, object]:
    error: dict[str, object] = json.loads(reply.body)["error"]
    return error


@pytest.mark.parametrize("target", ["/v1/completions", "/generate", "/v1/chat/completions"])
def test_a_request_goes_to_a_server_of_its_model(
    two_models: RelayRig, servers: tuple[RawServer, RawServer], target: str
) -> None:
    ports = [_from(ask(two_models.address, _named(model, target))) for model in "abba"]

    one, other = (server.port for server in servers)
    assert ports == [one, other, other, one]


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"a": {"model": "a"}, "model": "b", "c": [{"model": "a"}]}', "b"),
        (b'{"model": "a", "model": "b"}', "b"),
        (b'{"\\u006dodel": "\\u0062"}', "b"),
        (b'{"prompt": "\\"model\\": \\"a\\"", "model": "b"}', "b"),
        (b'{"prompt": "' + LARGE + b'", "model": "b"}', "b"),
        (b'{"model": "b", "prompt": "' + TOO_LARGE + b'"}', "b"),
        (b'{"x": [' + b'{"model": "a"}, ' * 9999 + b'"model"], "model": "b"}', "b"),
    ],
    ids=["nested", "twice", "escaped", "in_a_text", "behind_much", "before_more", "behind_pieces"],
)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_model_is_the_one_that_a_server_would_read(
    two_models: RelayRig,
    servers: tuple[RawServer, RawServer],
    body: bytes,
    model: str,
    is_chunked: bool,
) -> None:
    request = post("/v1/completions", body)
    if is_chunked:
        pieces = [chunk(body[at : at + 10_007]) for at in range(0, len(body), 10_007)]
        head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"
        request = head + b"".join(pieces) + chunk(b"")

    port = _from(ask(two_models.address, request))

    assert port == servers["ab".index(model)].port
    assert servers["ab".index(model)].seen[-1].body == body


def test_an_unknown_model_is_a_404_as_openai_answers_it(two_models: RelayRig) -> None:
    reply = ask(two_models.address, _named("gpt-9"))

    error = _error(reply)
    assert reply.status == 404
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "model",
        "model_not_found",
    )
    assert "'gpt-9'" in str(error["message"]) and "a, b" in str(error["message"])


@pytest.mark.parametrize("body", [b'{"prompt": "p"}', b'{"model": "default"}', b"not json", b""])
def test_a_request_without_a_model_is_a_400_while_there_are_several(
    two_models: RelayRig, body: bytes
) -> None:
    reply = ask(two_models.address, post("/v1/completions", body))

    assert (reply.status, _error(reply)["param"]) == (400, "model")


def test_a_model_that_is_not_found_in_the_beginning_of_a_huge_body_is_a_400_that_says_so(
    two_models: RelayRig, servers: tuple[RawServer, RawServer]
) -> None:
    before = [len(server.seen) for server in servers]
    body = b'{"prompt": "' + TOO_LARGE + b'", "model": "b"}'

    reply = ask(two_models.address, post("/v1/completions", body))

    assert reply.status == 400
    assert "write the field model before" in str(_error(reply)["message"])
    assert [len(server.seen) for server in servers] == before


@pytest.mark.parametrize("body", [b'{"prompt": "p"}', b'{"model": "default"}', b"not json", b""])
def test_a_request_without_a_model_is_served_while_there_is_one(
    two_servers: RelayRig, body: bytes
) -> None:
    assert ask(two_servers.address, post("/v1/completions", body)).status == 200


@pytest.mark.parametrize(
    ("end", "status"), [(b'"model": "x"}', 404), (b'"model": "a", "model": "b"}', 400)]
)
def test_a_large_body_that_turns_out_to_name_another_model_is_no_whole_request_to_a_server(
    two_servers: RelayRig, servers: tuple[RawServer, RawServer], end: bytes, status: int
) -> None:
    before = [len(server.seen) for server in servers]

    reply = ask(two_servers.address, post(body=b'{"prompt": "' + LARGE + b'", ' + end))

    assert reply.status == status
    assert [len(server.seen) for server in servers] == before
    wait_until(
        "nothing is in flight",
        lambda: not any(two_servers.counters.totals(counters.IN_FLIGHT, 2)),
    )


def test_a_model_is_asked_about_where_it_is(
    two_models: RelayRig, servers: tuple[RawServer, RawServer]
) -> None:
    port = _from(ask(two_models.address, line("GET /v1/models/%62")))

    assert port == servers[1].port
    assert ask(two_models.address, line("GET /v1/models/c")).status == 404


def test_the_list_of_models_is_a_servers_own_while_there_is_one(
    rig: RelayRig, servers: tuple[RawServer, RawServer]
) -> None:
    one = ModelRow(slots=(0,))
    rows = [row(0, servers[0])]
    request = line("GET /v1/models")

    rig.publish_as_is(table(rows, {"a": one}, unnamed=one))
    wait_until("a server", lambda: b"answer_of" in ask(rig.address, request).body)
    rig.publish_as_is(table(rows, {"a": one, "b": one}, unnamed=one))
    wait_until("the control process", lambda: ask(rig.address, request).body == CONTROL_ANSWER)


@pytest.mark.parametrize("names", [(), ("a",)])
def test_the_list_of_models_waits_for_no_server(rig: RelayRig, names: tuple[str, ...]) -> None:
    nobody = ModelRow(slots=(), may_wait=True, reason="wires")
    rig.publish_as_is(table([], dict.fromkeys(names, nobody), unnamed=nobody))
    holds = rig.total(counters.HOLDS)

    request = line("GET /v1/models")
    wait_until("the control process", lambda: ask(rig.address, request).body == CONTROL_ANSWER)

    assert rig.total(counters.HOLDS) == holds


@pytest.mark.parametrize(
    "target",
    ["/", "/workers", "/workers/attn-0", "/afd/v1/groups", "/afd/v1/servers/a/drain", "/readiness"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_what_is_the_control_planes_goes_to_the_control_process(
    two_models: RelayRig, method: str, target: str
) -> None:
    reply = ask(two_models.address, line(f"{method} {target}"))

    assert reply.body == CONTROL_ANSWER
    assert two_models.controlled[-1] == target


def test_requests_are_held_while_their_model_may_come_and_no_others(
    rig: RelayRig, servers: tuple[RawServer, RawServer]
) -> None:
    wiring = ModelRow(slots=(), may_wait=True, reason="g1 is wiring")
    ready = ModelRow(slots=(1,))
    rows = [row(0, servers[0], Standing.WAITING), row(1, servers[1])]
    rig.publish(table(rows, {"a": wiring, "b": ready}))

    with Client(rig.address) as client:
        client.send(_named("a"))
        rig.wait_for("it is held", counters.HELD, 1)
        port = _from(ask(rig.address, _named("b")))
        rig.publish(table(rows, {"a": ModelRow(slots=(0,)), "b": ready}))
        held = _from(client.reply())

    assert (port, held) == (servers[1].port, servers[0].port)
    assert rig.total(counters.HELD) == 0


def test_a_held_request_is_told_at_once_that_there_is_nothing_to_wait_for(
    rig: RelayRig, servers: tuple[RawServer, RawServer]
) -> None:
    rig.publish(table([], {"a": ModelRow(slots=(), may_wait=True, reason="wires")}))
    holds = rig.total(counters.HOLDS)

    with Client(rig.address) as client:
        client.send(_named("a"))
        rig.wait_for("it is held", counters.HELD, 1)
        rig.publish(table([], {"a": ModelRow(slots=(), reason="all its servers are gone")}))
        reply = client.reply()

    message = str(_error(reply)["message"])
    assert reply.status == 503 and "all its servers are gone" in message
    assert "none became ready within" not in message
    assert int(reply.values("retry-after")[0]) > 0
    assert rig.total(counters.HOLDS) == holds + 1


async def _never(talk: Talk) -> None:
    await talk.server.gate.wait()
    await answer_ok(talk)


async def _head_then_never(talk: Talk) -> None:
    await talk.send(SSE_HEAD)
    await talk.server.gate.wait()
    await talk.send(event("late") + DONE)


async def _token_then_never(talk: Talk) -> None:
    await talk.send(SSE_HEAD + event("one"))
    await talk.server.gate.wait()
    await talk.send(event("two") + DONE)


@pytest.mark.parametrize("has_left", [False, True], ids=["degraded", "gone"])
@pytest.mark.parametrize("script", [_never, _head_then_never])
def test_a_request_without_a_token_leaves_a_server_in_trouble_for_one_that_serves(
    rig: RelayRig, servers: tuple[RawServer, RawServer], script: Script, has_left: bool
) -> None:
    one, other = servers
    one.scripts[b"sticks"] = script
    other.scripts[b"sticks"] = answer_ok
    one.close_gate()
    rig.publish(table([row(0, one)], {"a": ModelRow(slots=(0,))}))
    replayed, case = rig.total(counters.REPLAYED), f"sticks_{script.__name__}_{has_left}"
    with Client(rig.address) as client:
        client.send(_named("a", f"/v1/completions?answer=sticks&case={case}"))
        wait_until("the first server has it", lambda: bool(one.of_case(case)))
        away = [] if has_left else [row(0, one, Standing.DEGRADED)]
        rig.publish(table(away, {"a": ModelRow(slots=(), may_wait=True)}))
        assert other.of_case(case) == []  # nobody else could take it yet
        assert rig.counters.totals(counters.IN_FLIGHT, 2) == [1, 0]

        rig.publish(table([*away, row(1, other)], {"a": ModelRow(slots=(1,))}))
        port = _from(client.reply())

    assert port == other.port
    assert other.of_case(case)[0].body == one.of_case(case)[0].body
    wait_until("the first server sees it", lambda: any(case.encode() in it for it in one.left))
    assert rig.total(counters.REPLAYED) == replayed + 1
    assert rig.counters.totals(counters.IN_FLIGHT, 2) == [0, 0]


@pytest.mark.parametrize("state", [Standing.DEGRADED, Standing.DRAINING, UNPLACED])
def test_a_stream_that_has_begun_stays_with_its_server(
    rig: RelayRig, servers: tuple[RawServer, RawServer], state: str
) -> None:
    _stays(rig, servers, _token_then_never, state, f"begun_{state}", b"one")


def test_a_request_without_a_token_stays_with_a_draining_server(
    rig: RelayRig, servers: tuple[RawServer, RawServer]
) -> None:
    _stays(rig, servers, _head_then_never, Standing.DRAINING, "drains", b"")


def _stays(
    rig: RelayRig,
    servers: tuple[RawServer, RawServer],
    script: Script,
    state: str,
    case: str,
    first: bytes,
) -> None:
    one, other = servers
    one.scripts[b"stays"] = script
    one.close_gate()
    rig.publish(table([row(0, one)], {"a": ModelRow(slots=(0,))}))
    with Client(rig.address) as client:
        client.send(_named("a", f"/v1/completions?answer=stays&case={case}"))
        wait_until("it has it", lambda: bool(one.of_case(case)))
        while first not in client.data:
            client.more()

        rig.publish(table([row(0, one, state), row(1, other)], {"a": ModelRow(slots=(1,))}))
        one.open_gate()
        reply = client.reply()

    assert reply.is_whole and reply.body.endswith(b"data: [DONE]\n\n")
    assert other.of_case(case) == []


def test_a_burst_is_spread_though_no_report_came(
    rig: RelayRig, servers: tuple[RawServer, RawServer]
) -> None:
    one, other = servers
    for server in servers:
        server.scripts[b"burst"] = _never
        server.close_gate()
    # The second has a request of somebody else, so that it gets one fewer.
    rows = [row(0, one, max_running=64), row(1, other, num_reported=1, max_running=64)]
    rig.publish(table(rows, {"a": ModelRow(slots=(0, 1))}))

    clients = [Client(rig.address) for _ in range(31)]
    for client in clients:
        client.send(_named("a", "/v1/completions?answer=burst&case=burst"))
    wait_until("all are there", lambda: sum(len(s.of_case("burst")) for s in servers) == 31)
    counts = [len(server.of_case("burst")) for server in servers]
    for server in servers:
        server.open_gate()
    statuses = [client.reply().status for client in clients]
    for client in clients:
        client.socket.close()

    assert counts == [16, 15]
    assert statuses == [200] * 31


def test_requests_that_begin_alike_go_to_one_server_under_the_prefix_policy(
    servers: tuple[RawServer, RawServer],
) -> None:
    both = ModelRow(slots=(0, 1))
    with RelayRig(policy="prefix") as rig:
        rig.publish(table([row(slot, servers[slot]) for slot in (0, 1)], {"a": both}, both))
        ports = {
            number: {
                _from(
                    ask(
                        rig.address,
                        post(body=b'{"text": "%d%b%d"}' % (number, b"y" * 300, again)),
                    )
                )
                for again in range(4)
            }
            for number in range(16)
        }

    assert all(len(each) == 1 for each in ports.values())
    assert len(set.union(*ports.values())) == 2


def test_a_server_that_breaks_off_is_told_once_and_one_that_refuses_too(
    rig: RelayRig, servers: tuple[RawServer, RawServer], gone: RawServer
) -> None:
    async def die(talk: Talk) -> None:
        await talk.send(SSE_HEAD + event("one"))
        talk.reset()

    servers[0].scripts[b"dies"] = die
    rig.publish(
        table(
            [row(0, servers[0]), row(2, gone)],
            {"a": ModelRow(slots=(0,)), "c": ModelRow(slots=(2,))},
        )
    )
    rig.told.clear()

    ask(rig.address, _named("a", "/v1/completions?answer=dies"))
    with Client(rig.address) as client:
        client.send(_named("c"))
        wait_until("both are told", lambda: len(rig.told) == 2)

    broken, refused = rig.told
    assert isinstance(broken, BrokeOff) and broken.slot == 0 and "reset" in broken.reason
    assert isinstance(refused, Unreachable) and refused.slot == 2
    rig.wait_for("nobody is held", counters.HELD, 0)


def test_a_server_that_breaks_off_many_answers_at_once_is_told_about_less_often(
    rig: RelayRig, servers: tuple[RawServer, RawServer]
) -> None:
    async def die_together(talk: Talk) -> None:
        await talk.send(SSE_HEAD + event("one"))
        await talk.server.gate.wait()
        talk.reset()

    (one, _), num_streams = servers, 64
    one.scripts[b"dies_together"] = die_together
    one.close_gate()
    rig.publish(table([row(3, one)], {"a": ModelRow(slots=(3,))}))
    rig.told.clear()
    clients = [Client(rig.address) for _ in range(num_streams)]
    for client in clients:
        client.send(_named("a", "/v1/completions?answer=dies_together"))
    for client in clients:
        while b"one" not in client.data:
            client.more()

    one.open_gate()
    replies = [client.reply() for client in clients]
    for client in clients:
        client.socket.close()

    assert not any(reply.is_whole for reply in replies)
    wait_until("it is told", lambda: bool(rig.told))
    assert len(rig.told) < num_streams / 2


def test_times_to_the_first_token_are_those_of_streams_by_server(
    two_models: RelayRig, servers: tuple[RawServer, RawServer]
) -> None:
    async def stream(talk: Talk) -> None:
        await talk.send(SSE_HEAD + event("one") + DONE)

    servers[1].scripts[b"streams"] = stream
    before = two_models.counters.totals(counters.TTFT_COUNT, 2)

    for model in "abb":
        answer = "?answer=streams" if model == "b" else ""
        ask(two_models.address, _named(model, f"/v1/completions{answer}"))

    after = two_models.counters.totals(counters.TTFT_COUNT, 2)
    assert [now - then for now, then in zip(after, before, strict=True)] == [0, 2]


def test_a_slot_that_another_server_has_leads_there(
    rig: RelayRig, servers: tuple[RawServer, RawServer]
) -> None:
    ports = []
    for server in servers:
        rig.publish(table([row(7, server)], {"a": ModelRow(slots=(7,))}))
        ports.append(_from(ask(rig.address, _named("a"))))

    assert ports == [server.port for server in servers]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ("", 401),
        ("Authorization: Bearer wrong\r\n", 401),
        (f"Authorization: Basic {KEY}\r\n", 401),
        (f"Authorization: Bearer {KEY}x\r\n", 401),
        (f"Authorization: Bearer {KEY}\r\nAuthorization: Bearer {KEY}\r\n", 401),
        (f"Authorization: Bearer {KEY}\r\n", 200),
        (f"authorization: bearer  {KEY}\r\n", 200),
    ],
)
def test_only_who_knows_the_key_is_served(
    keyed: RelayRig, servers: tuple[RawServer, RawServer], fields: str, status: int
) -> None:
    before = len(servers[0].seen)

    reply = ask(keyed.address, post(fields=fields))

    assert reply.status == status
    assert len(servers[0].seen) == before + (status == 200)
    if status == 200:
        (given,) = servers[0].seen[-1].values("authorization")
        assert given.decode() == fields.partition(":")[2].strip()
    else:
        assert _error(reply)["code"] == "invalid_api_key" and KEY.encode() not in reply.body
        assert reply.values("www-authenticate") == [b"Bearer"]


@pytest.fixture(scope="module")
def keyed(servers: tuple[RawServer, RawServer]) -> Iterator[RelayRig]:
    with RelayRig(api_key=Key(KEY.encode())) as rig:
        anybody = ModelRow(slots=(0,))
        rig.publish_as_is(table([row(0, servers[0])], {"a": anybody}, anybody))
        good = post(fields=f"Authorization: Bearer {KEY}\r\n")
        wait_until("it serves", lambda: ask(rig.address, good).status == 200)
        yield rig


def test_where_all_that_serve_refuse_connections_the_503_says_so(gone: RawServer) -> None:
    serving = ModelRow(slots=(0,), may_wait=True)
    with RelayRig(hold_timeout_s=0.1) as rig:
        rig.publish(table([row(0, gone)], {"a": serving}))

        reply = ask(rig.address, post(body=b'{"model": "a"}'))

    assert reply.status == 503
    assert b"those that serve cannot be reached. Try again shortly" in reply.body
