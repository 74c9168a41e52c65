from __future__ import annotations

import re

import msgspec
import pytest
from page_scenes import Ready, answer_of, empty, hostile, many, troubled

from sgl_router_afd.api.shapes import GroupsAnswer
from sgl_router_afd.status_client import base_of
from sgl_router_afd.status_table import Style, table
from sglang_afd.errors import ConfigError

BASE = "http://127.0.0.1:30000"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def lines(answer: GroupsAnswer, width: int, *, has_colour: bool = False) -> list[str]:
    return table(BASE, answer, Style(width=width, has_colour=has_colour)).splitlines()


def test_a_ready_group_is_a_table_with_a_row_for_each_server() -> None:
    shown = lines(Ready().step(), 120)

    start = shown.index("group group-1  READY  serves Qwen3-30B-A3B, epoch 4")
    assert shown[start + 1 : start + 7] == [
        "  2 of 2 attention servers serve",
        "  server       state    running  waiting   KV  tok/s   TTFT  uneven  heard  peers",
        "  attn attn-0  serving    30/64        1  67%   1239  38 ms       -    now  mlp-0 mlp-1",
        "  attn attn-1  serving    39/64        2  75%   1611  38 ms       -    now  mlp-0 mlp-1",
        "  mlp mlp-0    serving        -        -    -      -      -   1.33x    now  -",
        "  mlp mlp-1    serving        -        -    -      -      -   1.77x    now  -",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    shown = lines(answer_of(troubled()), width) + lines(answer_of(many()), width)

    assert [line for line in shown if len(line) > width] == []


@pytest.mark.parametrize("width", [60, 120])
def test_every_server_state_and_reason_is_there_at_any_width(width: int) -> None:
    said = " ".join(" ".join(lines(answer_of(troubled()), width)).split())

    for words in (
        "attn attn-1 degraded",
        "stalled: waits for mlp-1 with 31 requests",
        "lost mlp-1: no heartbeat for 1.2 s",
        "attn attn-3 draining",
        "group group-2 FORMING",
        "mlp mlp-spare unplaced",
        "serves another model",
        "http://10.0.0.7:30020: connection refused; is the server started?",
        "1 min ago attn-1 reports that it lost mlp-1",
    ):
        assert words in said


def test_colour_adds_nothing_but_colour() -> None:
    answer = answer_of(troubled())

    coloured = lines(answer, 120, has_colour=True)

    assert coloured != lines(answer, 120)
    assert [ESCAPES.sub("", line) for line in coloured] == lines(answer, 120)


def test_text_of_servers_cannot_move_the_cursor_or_forge_a_line() -> None:
    answer = answer_of(hostile("\x1b[2Jgone\r\n\x07group x  READY\u202e"))

    shown = "\n".join(lines(answer, 120))

    assert "gone" in shown
    assert not re.search(r"[^\n\x20-\x7e]", shown)
    assert not re.search(r"^group x", shown, re.MULTILINE)


def test_an_empty_router_says_how_to_start_servers() -> None:
    shown = "\n".join(lines(answer_of(empty()), 80))

    assert "No server has registered yet" in shown
    assert f"--role mlp --port 30010 --afd-router {BASE}" in shown


def test_a_peer_list_that_has_no_room_is_cut_visibly() -> None:
    scene = Ready()
    group = scene.step().groups[0]
    peers = tuple(f"mlp-{index}" for index in range(40))
    servers = tuple(msgspec.structs.replace(one, attached=peers) for one in group.attn)
    group = msgspec.structs.replace(group, attn=servers)
    answer = msgspec.structs.replace(scene.step(), groups=(group,))

    shown = [line for line in lines(answer, 120) if line.startswith("  attn")]

    assert {len(line) for line in shown} == {120}
    assert all(line.endswith("...") for line in shown)


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://[::1]:30000/", "http://[::1]:30000"),
        ("https://router.example", "https://router.example"),
    ],
)
def test_the_address_may_be_written_as_people_write_it(text: str, base: str) -> None:
    assert base_of(text) == base


@pytest.mark.parametrize("text", ["ftp://x:1", "http://", "http://x:1/afd", "http://x:99999"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="wanted the router's http://host:port"):
        base_of(text)
