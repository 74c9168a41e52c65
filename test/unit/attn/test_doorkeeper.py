from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from registering import silent_registrar
from starlette.types import Receive, Scope, Send

from sglang_afd.attn.doorkeeper import Doorkeeper
from sglang_afd.attn.open_requests import OpenRequests
from sglang_afd.attn.status import LinkState, StatusBoard


def parts_of(
    board: StatusBoard, is_warm: threading.Event, is_stopping: threading.Event
) -> dict[str, Any]:
    """Of a server that no router knows."""
    return {
        "board": board,
        "registrar": silent_registrar(),
        "open_requests": OpenRequests(),
        "is_warm": is_warm,
        "is_stopping": is_stopping,
    }


def ask(board: StatusBoard, path: str, *, is_warm: bool = True) -> tuple[int, Any]:
    """Status and body of one request; what is let through answers 299."""
    sent: list[Any] = []
    warm = threading.Event()
    if is_warm:
        warm.set()

    async def sglang(scope: Scope, receive: Receive, send: Send) -> None:
        sent.append({"status": 299})
        sent.append({"body": b"null"})

    async def keep(message: Any) -> None:
        sent.append(message)

    async def nothing() -> Any:
        return {"type": "http.request"}

    door = Doorkeeper(sglang, **parts_of(board, warm, threading.Event()))
    asyncio.run(door({"type": "http", "path": path, "headers": []}, nothing, keep))
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.fixture
def ready() -> StatusBoard:
    """Attached."""
    board = StatusBoard()
    board.update(state=LinkState.READY, epoch=7)
    return board


def test_generation_reaches_sglang_while_attached(ready: StatusBoard) -> None:
    assert ask(ready, "/v1/chat/completions")[0] == 299


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/score", "/health_generate"])
def test_what_needs_experts_is_503_with_the_reason_while_detached(path: str) -> None:
    board = StatusBoard()
    board.update(state=LinkState.DETACHED, reason="rank 1 is gone")

    status, body = ask(board, path)

    assert status == 503
    assert "rank 1 is gone" in body["error"]["message"]


@pytest.fixture
def stalled() -> StatusBoard:
    """Lost its MLP servers three seconds ago, and gives up in a minute."""
    board = StatusBoard()
    now_s = time.monotonic()
    board.update(
        state=LinkState.STALLED,
        reason="rank 1 is gone",
        stalled_since_s=now_s - 3,
        held_until_s=now_s + 60,
    )
    return board


def test_requests_are_let_through_while_stalled_so_that_the_scheduler_holds_them(
    stalled: StatusBoard,
) -> None:
    assert ask(stalled, "/generate")[0] == 299
    assert ask(stalled, "/v1/chat/completions")[0] == 299


def test_the_probe_that_asks_for_an_answer_now_is_503_while_stalled(stalled: StatusBoard) -> None:
    status, body = ask(stalled, "/health_generate")

    assert status == 503
    assert "rank 1 is gone" in body["error"]["message"]
    assert ask(stalled, "/health")[0] == 299


def test_the_status_says_since_when_it_stalls_and_until_when(stalled: StatusBoard) -> None:
    body = ask(stalled, "/afd/v1/status")[1]

    assert (body["state"], body["reason"]) == ("stalled", "rank 1 is gone")
    assert 3 <= body["stalled_for_s"] < 30
    assert 30 < body["gives_up_in_s"] <= 60


def test_a_stall_that_nobody_waits_for_any_more_is_detached(stalled: StatusBoard) -> None:
    stalled.update(held_until_s=time.monotonic())

    body = ask(stalled, "/afd/v1/status")[1]

    assert (body["state"], body["stalled_for_s"], body["gives_up_in_s"]) == ("detached", None, None)
    assert ask(stalled, "/generate")[0] == 503


def test_what_needs_no_experts_reaches_sglang_while_detached() -> None:
    assert ask(StatusBoard(), "/health")[0] == 299
    assert ask(StatusBoard(), "/v1/models")[0] == 299


@pytest.mark.parametrize(
    "path",
    [
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/init_weights_update_group",
        "/load_lora_adapter",
    ],
)
def test_half_a_model_cannot_be_changed(ready: StatusBoard, path: str) -> None:
    status, body = ask(ready, path)

    assert status == 400
    assert "restart both roles" in body["error"]["message"]


def test_the_status_is_ready_once_attached_and_warm(ready: StatusBoard) -> None:
    assert ask(ready, "/afd/v1/status")[1]["state"] == "ready"
    cold = ask(ready, "/afd/v1/status", is_warm=False)[1]
    assert (cold["state"], cold["reason"]) == ("starting", "the warm-up request is running")
    assert ask(StatusBoard(), "/afd/v1/status")[1]["reason"] == "waiting for the MLP servers"


def test_the_end_of_the_lifespan_is_told_before_sglang_waits_for_its_threads(
    ready: StatusBoard,
) -> None:
    is_stopping = threading.Event()
    seen: list[bool] = []

    async def sglang(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        seen.append(is_stopping.is_set())
        await receive()
        seen.append(is_stopping.is_set())

    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def next_message() -> Any:
        return next(messages)

    async def ignore(message: Any) -> None:
        return None

    door = Doorkeeper(sglang, **parts_of(ready, threading.Event(), is_stopping))
    asyncio.run(door({"type": "lifespan"}, next_message, ignore))

    assert seen == [False, True]


def test_the_registration_is_answered_once_the_server_knows_itself(ready: StatusBoard) -> None:
    status, body = ask(ready, "/afd/v1/registration")

    assert status == 503 and "the scheduler is not there yet" in body["error"]["message"]


def test_without_a_router_the_status_says_so(ready: StatusBoard) -> None:
    assert ask(ready, "/afd/v1/status")[1]["router"] is None


@pytest.mark.parametrize(("path", "num_open"), [("/generate", 1), ("/health", 0)])
def test_requests_that_need_experts_are_counted_while_they_run(
    ready: StatusBoard, path: str, num_open: int
) -> None:
    seen: list[int] = []
    parts = parts_of(ready, threading.Event(), threading.Event())

    async def sglang(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(parts["open_requests"].count())
        raise ConnectionError("the client has left")

    async def nothing(*_: Any) -> Any:
        return {}

    with pytest.raises(ConnectionError):
        asyncio.run(Doorkeeper(sglang, **parts)({"type": "http", "path": path}, nothing, nothing))

    assert seen == [num_open]
    assert parts["open_requests"].count() == 0


def test_a_server_that_drains_shows_it_instead_of_ready(ready: StatusBoard) -> None:
    parts = parts_of(ready, threading.Event(), threading.Event())
    parts["is_warm"].set()
    parts["registrar"].drain()
    sent: list[Any] = []

    async def nothing(*_: Any) -> Any:
        return {}

    async def keep(message: Any) -> None:
        sent.append(message)

    door = Doorkeeper(nothing, **parts)
    scope = {"type": "http", "path": "/afd/v1/status", "headers": []}
    asyncio.run(door(scope, nothing, keep))

    assert json.loads(sent[1]["body"])["state"] == "draining"
