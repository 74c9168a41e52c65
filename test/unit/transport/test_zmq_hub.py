from __future__ import annotations

import time
from pathlib import Path

import pytest
import zmq
from peers import make_gate

from sglang_afd.transport import zmq_hub
from sglang_afd.transport.base import Event
from sglang_afd.transport.sessions import Message
from sglang_afd.transport.zmq_hub import ZmqHub

PATIENCE_S = 30.0


def test_a_message_whose_connection_is_gone_is_dropped(tmp_path: Path) -> None:
    hub = ZmqHub(make_gate(), f"ipc://{tmp_path}/exchange", heartbeat_timeout_s=1.0)
    try:
        # A frame that came from no socket has no descriptor either.
        assert hub._receive([zmq.Frame(b"peer"), zmq.Frame(b"random")]) == []
    finally:
        hub.close()


@pytest.mark.parametrize("burst", [zmq_hub.MAX_BURST, 1])
def test_what_a_peer_said_before_it_left_is_read_before_its_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, burst: int
) -> None:
    hub = ZmqHub(make_gate(), f"ipc://{tmp_path}/hub", heartbeat_timeout_s=30.0)
    told: list[str] = []
    hear = hub._hear_of_ends

    def receive(peer: bytes, body: list[memoryview]) -> tuple[list[Event], list[Message]]:
        told.append(bytes(body[0]).decode())
        return [], []

    def gone(peer: bytes, reason: str) -> list[Event]:
        told.append(reason)
        return []

    def hear_once_it_left() -> bool:
        monkeypatch.setattr(hub, "_hear_of_ends", hear)
        socket.send(b"goodbye")
        socket.close(linger=int(1000 * PATIENCE_S))
        deadline_s = time.monotonic() + PATIENCE_S
        while not (has_ended := hear()):
            assert time.monotonic() < deadline_s
        return has_ended

    monkeypatch.setattr(zmq_hub, "MAX_BURST", burst)
    monkeypatch.setattr(hub._sessions, "receive", receive)
    monkeypatch.setattr(hub._sessions, "gone", gone)
    monkeypatch.setattr(hub, "_hear_of_ends", hear_once_it_left)
    with zmq.Context() as context:
        socket = context.socket(zmq.DEALER)
        socket.connect(f"ipc://{tmp_path}/hub")
        socket.send(b"hello")

        hub.poll(PATIENCE_S)
        for _ in range(3):  # of a burst of one message, the rest
            hub.poll(0.0)

    hub.close()
    assert told == ["hello", "goodbye", "its connection ended"]
