from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from descriptors import num_open

from sglang_afd.errors import PeerLost, Refused
from sglang_afd.protocol import codec
from sglang_afd.protocol.messages import OpenSlots, Refusal, RefusalCode, SlotsOpened
from sglang_afd.transport.cuda_ipc import door as door_module
from sglang_afd.transport.cuda_ipc import fds
from sglang_afd.transport.cuda_ipc.door import Door, Visit, bring

MESSAGE = OpenSlots(
    server_id="attn-0",
    epoch=7,
    num_slots=2,
    max_ranks=8,
    max_rows=5,
    hidden_size=4,
    top_k=2,
    dtype="float32",
    is_fp8=False,
)
PATIENCE_S = 30.0


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    """One that is open."""
    door = Door(str(tmp_path / "door"))
    yield door
    door.close()


@pytest.fixture
def slots() -> Iterator[tuple[int, int]]:
    """What an attention server brings."""
    pair = os.memfd_create("afd-slots"), os.memfd_create("afd-doorbells")
    os.write(pair[0], b"slots")
    os.write(pair[1], b"doorbells")
    yield pair
    fds.close_all(pair)


def wait_for_visit(door: Door) -> Visit:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if visits := door.take():
            return visits[0]
        time.sleep(0.001)
    raise AssertionError("nobody came")


def meanwhile(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_slots_that_are_brought_can_be_read_and_the_answer_comes_back(
    door: Door, slots: tuple[int, int]
) -> None:
    seen: list[object] = []

    def open_slots() -> None:
        visit = wait_for_visit(door)
        seen.append((visit.message, *(os.pread(fd, 100, 0) for fd in visit.fds)))
        visit.answer(SlotsOpened(epoch=visit.message.epoch))

    hub = meanwhile(open_slots)
    answer = bring(door.address, MESSAGE, slots, timeout_s=PATIENCE_S)
    hub.join(PATIENCE_S)

    assert seen == [(MESSAGE, b"slots", b"doorbells")]
    assert answer == SlotsOpened(epoch=7)
    assert (num_open("afd-slots"), num_open("afd-doorbells")) == (1, 1)


def test_a_refusal_reaches_who_brought_the_slots(
    door: Door, slots: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    refusal = Refusal(code=RefusalCode.EPOCH, message="the session has ended")
    hub = meanwhile(lambda: wait_for_visit(door).answer(refusal))

    with pytest.raises(Refused, match="^the session has ended$") as caught:
        bring(door.address, MESSAGE, slots, timeout_s=PATIENCE_S)
    hub.join(PATIENCE_S)

    assert caught.value.code == RefusalCode.EPOCH
    assert "slots of attn-0 are refused: the session has ended" in caplog.text
    assert num_open("afd-slots") == 1


def test_only_this_users_directory_holds_the_door() -> None:
    door = Door()

    mode = Path(door.address).parent.stat().st_mode & 0o777
    door.close()

    assert mode == 0o700
    assert not Path(door.address).exists()


def test_a_process_of_another_user_is_sent_away(tmp_path: Path, slots: tuple[int, int]) -> None:
    door = Door(str(tmp_path / "door"), owner=os.getuid() + 1)

    with pytest.raises(Refused, match=f"user {os.getuid()} came, only user {os.getuid() + 1} may"):
        bring(door.address, MESSAGE, slots, timeout_s=PATIENCE_S)
    visits = door.take()
    door.close()

    assert visits == []


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("sent", "num_fds", "message"),
    [
        (b"\xff\xff\xff\xff", 2, "of 4294967295 bytes came over a Unix socket"),
        (frame(b"garbage"), 2, "does not begin with the sglang-afd mark"),
        (frame(codec.encode(SlotsOpened(epoch=7))), 2, "does not parse"),
        (frame(codec.encode(MESSAGE)), 3, "more than 2 file descriptors"),
        (frame(codec.encode(MESSAGE)), 1, "1 file descriptors came with the slots, expected 2"),
    ],
)
def test_what_is_wrong_is_told_logged_once_and_leaves_nothing_open(
    door: Door, caplog: pytest.LogCaptureFixture, sent: bytes, num_fds: int, message: str
) -> None:
    mine = [os.memfd_create("afd-stranger") for _ in range(num_fds)]
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(door.address)
        socket.send_fds(stranger, [sent], mine)
        fds.close_all(mine)
        answer = codec.decode_from_door(fds.receive(stranger, num_fds=0, timeout_s=PATIENCE_S).body)

    assert isinstance(answer, Refusal)
    assert message in answer.message
    assert [message in record.getMessage() for record in caplog.records] == [True]
    assert door.take() == []
    assert num_open("afd-stranger") == 0


def test_who_says_nothing_does_not_keep_the_door_shut(
    door: Door, slots: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "READ_TIMEOUT_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(door.address)
        fds.receive(silent, num_fds=0, timeout_s=PATIENCE_S)  # it has been sent away
        monkeypatch.setattr(door_module, "READ_TIMEOUT_S", PATIENCE_S)
        hub = meanwhile(lambda: wait_for_visit(door).answer(SlotsOpened(epoch=7)))

        answer = bring(door.address, MESSAGE, slots, timeout_s=PATIENCE_S)
        hub.join(PATIENCE_S)

    assert answer == SlotsOpened(epoch=7)


def test_who_leaves_before_the_answer_disturbs_nobody(door: Door, slots: tuple[int, int]) -> None:
    with pytest.raises(PeerLost, match="timed out"):
        bring(door.address, MESSAGE, slots, timeout_s=0.05)

    wait_for_visit(door).answer(SlotsOpened(epoch=7))

    assert num_open("afd-slots") == 1


def test_a_closed_door_is_a_lost_peer(door: Door, slots: tuple[int, int]) -> None:
    door.close()
    door.close()

    with pytest.raises(PeerLost, match="is closed"):
        bring(door.address, MESSAGE, slots, timeout_s=PATIENCE_S)


def test_closing_sends_away_who_waits(door: Door, slots: tuple[int, int]) -> None:
    errors: list[Exception] = []

    def visit() -> None:
        try:
            bring(door.address, MESSAGE, slots, timeout_s=PATIENCE_S)
        except (PeerLost, Refused) as error:
            errors.append(error)

    visitor = meanwhile(visit)
    wait_until(lambda: num_open("afd-slots") > 1)
    door.close()
    visitor.join(PATIENCE_S)

    assert len(errors) == 1
    assert num_open("afd-slots") == 1


def test_whoever_listens_as_another_user_gets_no_slots(
    door: Door, slots: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)

    with pytest.raises(Refused, match="belongs to user .*, this server runs as 12345"):
        bring(door.address, MESSAGE, slots, timeout_s=PATIENCE_S)


def test_the_thread_outlives_many_who_are_wrong(
    door: Door, slots: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    for _ in range(50):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(door.address)
    hub = meanwhile(lambda: wait_for_visit(door).answer(SlotsOpened(epoch=7)))

    assert bring(door.address, MESSAGE, slots, timeout_s=PATIENCE_S) == SlotsOpened(epoch=7)

    hub.join(PATIENCE_S)
