"""Spare MLP servers that take the place of dead ones, while requests run."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fleet
import pytest
from compare import PROMPTS, ask_one_by_one, differences
from fleet import Oracle
from servers import Server, Zygote, running
from streams import Stream, finish_all, start_streams

from sglang_afd.ports import free_ports

NUM_TOKENS = 100
NUM_ATTEMPTS = 5


@dataclass(frozen=True)
class Group:
    """MLP ranks and spares on neighbouring ports, and an attention server."""

    zygote: Zygote
    oracle: Oracle
    num_ranks: int
    ports: list[int]  # of the ranks, then of the spares
    servers: list[Server]  # whatever was started

    @property
    def addresses(self) -> str:
        """Where rank 0 may be: at its own address, or at a spare's."""
        leaders = [self.ports[0], *self.ports[self.num_ranks :]]
        return ",".join(f"http://127.0.0.1:{port}" for port in leaders)

    def start_mlp(self, port: int, *flags: str, plant: str | None = None) -> Server:
        argv = [
            *("--role", "mlp", "--model-path", str(self.oracle.model), "--dtype", "float32"),
            *("--ep-size", str(self.num_ranks), "--afd-leader", self.addresses),
            *("--afd-max-rows", str(fleet.MAX_ROWS), *flags, "--port", str(port)),
        ]
        server = self.zygote.start("afd", argv, plant=plant)
        server = Server(server.pid, port, server.log)
        self.servers.append(server)
        return server

    def start_rank(self, rank: int) -> Server:
        return self.start_mlp(self.ports[rank], "--afd-ep-rank", str(rank))

    def start_spare(self, index: int, plant: str | None = None) -> Server:
        port = self.ports[self.num_ranks + index]
        return self.start_mlp(port, "--afd-spare", plant=plant)

    def start_attn(self) -> Server:
        flags = ("--afd-mlp", self.addresses)
        server = fleet.start_attn(self.zygote, self.oracle.model, self.ports[0], *flags)
        self.servers.append(server)
        return server


@pytest.fixture
def groups(zygote: Zygote, qwen3_oracle: Oracle) -> Iterator[Any]:
    """Makes a group; its servers are stopped at the end."""
    made: list[Group] = []

    def make(num_ranks: int, num_spares: int) -> Group:
        ports = free_ports(num_ranks + num_spares)
        made.append(Group(zygote, qwen3_oracle, num_ranks, ports, []))
        return made[-1]

    yield make
    with running([server for group in made for server in group.servers]):
        pass


def _wait_state(server: Server, state: str) -> None:
    server.wait("/afd/v1/status", lambda body: body["state"] == state)


def _expected(oracle: Oracle, attn: Server) -> list[list[int]]:
    """What undisturbed streams get; their first tokens are stock SGLang's."""
    tokens = finish_all(start_streams([attn.url], PROMPTS, NUM_TOKENS))
    for stream, answer in zip(tokens, oracle.one_by_one, strict=True):
        assert tuple(stream[: len(answer.token_ids)]) == answer.token_ids
    return tokens


def _streams_on_their_way(attn: Server) -> list[Stream]:
    for _ in range(NUM_ATTEMPTS):  # on a busy machine clients may hear of their tokens too late
        streams = start_streams([attn.url], PROMPTS, NUM_TOKENS)
        for stream in streams:
            stream.wait_for(3)
        if all(len(stream.tokens) < NUM_TOKENS // 2 for stream in streams):
            return streams
        finish_all(streams)
    raise AssertionError("the streams were never in their middle at once")


def _kill(servers: Sequence[Server], streams: Sequence[Stream]) -> None:
    """While the streams run."""
    for server in servers:
        server.signal(signal.SIGKILL)
    num_tokens = sum(len(stream.tokens) for stream in streams)
    assert num_tokens < len(streams) * NUM_TOKENS


def _wait_ranks(attn: Server, servers: Sequence[Server]) -> None:
    """Until these are what it is attached to: none is while it attaches anew."""
    expected = _boot_ids(servers)
    attn.wait("/afd/v1/status", lambda body: [rank["boot_id"] for rank in body["mlp"]] == expected)


def _boot_ids(servers: Sequence[Server]) -> list[str]:
    return [server.get("/server_info")[1]["boot_id"] for server in servers]


def test_a_spare_takes_the_experts_of_a_dead_rank_and_no_stream_loses_a_token(groups: Any) -> None:
    group = groups(num_ranks=2, num_spares=1)
    ranks = [group.start_rank(0), group.start_rank(1)]
    spare, attn = group.start_spare(0), group.start_attn()
    fleet.wait_ready(attn)
    _wait_state(spare, "spare")
    info = spare.get("/server_info")[1]
    assert (info["role"], info["state"]) == ("mlp", "spare")
    assert "exchange_address" not in info and "ep_rank" not in info
    assert spare.get("/health")[0] == 200
    expected = _expected(group.oracle, attn)
    _wait_ranks(attn, ranks)

    streams = _streams_on_their_way(attn)
    _kill([ranks[1]], streams)
    _wait_state(spare, "ready")

    assert finish_all(streams) == expected
    _wait_ranks(attn, [ranks[0], spare])
    taken = spare.get("/server_info")[1]
    assert (taken["ep_rank"], taken["first_expert"], taken["stop_expert"]) == (1, 8, 16)
    assert differences(group.oracle.one_by_one, ask_one_by_one(attn.url)) == []

    returned = group.start_rank(1)
    _wait_state(returned, "displaced")
    assert "rank 1 is already served by" in returned.get("/afd/v1/status")[1]["reason"]
    spare.signal(signal.SIGKILL)
    _wait_state(returned, "ready")
    assert differences(group.oracle.one_by_one, ask_one_by_one(attn.url)) == []


@pytest.mark.slow
def test_a_spare_becomes_rank_0_and_the_old_one_returns_as_a_spare(groups: Any) -> None:
    group = groups(num_ranks=1, num_spares=1)
    first, spare, attn = group.start_rank(0), group.start_spare(0), group.start_attn()
    fleet.wait_ready(attn)
    _wait_state(spare, "spare")
    expected = _expected(group.oracle, attn)

    for dying, successor in ((first, spare), (spare, None)):
        streams = _streams_on_their_way(attn)
        successor = successor or group.servers[-1]  # the old rank 0, by then a spare
        _kill([dying], streams)
        _wait_state(successor, "ready")
        assert finish_all(streams) == expected
        _wait_ranks(attn, [successor])
        assert differences(group.oracle.one_by_one, ask_one_by_one(attn.url)) == []

        losses = attn.get("/afd/v1/status")[1]["num_losses"]
        if dying is first:
            _wait_state(group.start_rank(0), "spare")
        assert attn.get("/afd/v1/status")[1]["num_losses"] == losses


@pytest.mark.slow
def test_when_every_rank_dies_two_spares_take_a_place_each(groups: Any) -> None:
    group = groups(num_ranks=2, num_spares=2)
    ranks = [group.start_rank(0), group.start_rank(1)]
    spares, attn = [group.start_spare(0), group.start_spare(1)], group.start_attn()
    fleet.wait_ready(attn)
    for spare in spares:
        _wait_state(spare, "spare")
    expected = _expected(group.oracle, attn)

    streams = _streams_on_their_way(attn)
    _kill(ranks, streams)
    for spare in spares:
        _wait_state(spare, "ready")

    assert finish_all(streams) == expected
    _wait_ranks(attn, spares)  # the first in the list leads
    assert differences(group.oracle.one_by_one, ask_one_by_one(attn.url)) == []


@pytest.mark.slow
def test_a_spare_with_the_wrong_experts_would_be_noticed(groups: Any) -> None:
    group = groups(num_ranks=2, num_spares=1)
    ranks = [group.start_rank(0), group.start_rank(1)]
    spare, attn = group.start_spare(0, plant="experts_of_rank_0"), group.start_attn()
    fleet.wait_ready(attn)
    _wait_state(spare, "spare")
    assert differences(group.oracle.one_by_one[:4], ask_one_by_one(attn.url, PROMPTS[:4])) == []

    ranks[1].signal(signal.SIGKILL)
    _wait_state(spare, "ready")
    fleet.wait_ready(attn)

    _wait_ranks(attn, [ranks[0], spare])
    assert differences(group.oracle.one_by_one[4:8], ask_one_by_one(attn.url, PROMPTS[4:8])) != []
