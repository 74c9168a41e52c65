from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_afd.errors import ConfigError
from sglang_afd.trace import file
from sglang_afd.trace.header import header_of_this_process
from sglang_afd.trace.reading import read_timeline
from sglang_afd.trace.recorder import CHUNK, Recorder

WRITER = """
import sys, time
from sglang_afd.trace.header import header_of_this_process
from sglang_afd.trace.recorder import Recorder
recorder = Recorder(sys.argv[1], header_of_this_process("mlp", "mlp-0"))
for number in range(1000000000):
    now = time.monotonic_ns()
    recorder.span("work", 0, now, now + 10, number=number)
    time.sleep(0.0001)
"""


def record(path: Path, **limits: int) -> Recorder:
    return Recorder(str(path), header_of_this_process("attn", "attn-1"), **limits)


def test_a_closed_file_is_json_with_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    recorder = record(path)
    began_ns = time.monotonic_ns()
    recorder.name_track(3, "micro-batch 2")
    recorder.span("dispatch", 3, began_ns, began_ns + 1500, rows=7)
    recorder.instant("attached", 0, began_ns)

    recorder.close()

    header, name, order, span, instant = json.loads(path.read_text())
    assert header["args"]["server_id"] == "attn-1"
    assert (name["args"], order["args"]) == ({"name": "micro-batch 2"}, {"sort_index": 3})
    assert (span["ph"], span["tid"], span["dur"], span["args"]) == ("X", 3, 1.5, {"rows": 7})
    assert (instant["ph"], instant["s"]) == ("i", "t")
    since_begin_us = (began_ns - header["args"]["clock_ns"]) / 1000
    assert span["ts"] == instant["ts"] == since_begin_us


def test_the_file_of_a_killed_writer_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < 20_000:
        assert time.monotonic() < deadline and writer.poll() is None
        time.sleep(0.01)

    writer.send_signal(signal.SIGKILL)
    writer.wait()

    numbers = [event.args["number"] for event in read_timeline(path).events]
    assert len(numbers) > 100
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("missing", range(1, 60, 7))
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path, missing: int) -> None:
    path = tmp_path / "a.json"
    recorder = record(path)
    for number in range(3):
        recorder.span("work", 0, 0, 0, number=number)
    recorder.flush()
    path.write_bytes(path.read_bytes()[:-missing])

    events = read_timeline(path).events

    assert [event.args["number"] for event in events] == [0, 1]
    recorder.close()


def test_what_does_not_fit_into_memory_is_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    recorder = record(path, max_pending=2)
    with recorder._flushing:  # the writing thread waits, as for a slow disk
        for number in range(5):
            recorder.span("work", 0, 0, 0, number=number)

    recorder.close()

    events = read_timeline(path).events
    assert [event.args.get("number") for event in events] == [0, 1, 3]
    assert [event.name for event in events] == ["work", "work", "events dropped"]


def test_recording_stops_at_the_largest_size_and_the_server_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    recorder = record(path, max_file_bytes=50_000)
    for number in range(2000):
        recorder.span("work", 0, 0, 0, number=number)

    recorder.flush()

    recorder.span("work", 0, 0, 0)
    recorder.close()
    assert path.stat().st_size <= 50_000
    numbers = [event.args["number"] for event in read_timeline(path).events]
    assert len(numbers) > CHUNK and numbers == list(range(len(numbers)))


def test_a_disk_that_is_full_ends_the_recording_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = record(tmp_path / "a.json")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._descriptor)
    os.close(full)
    recorder.span("work", 0, 0, 0)

    recorder.flush()

    recorder.span("work", 0, 0, 0)
    assert not recorder._pending
    assert "No space left on device" in caplog.text
    recorder.close()


def test_a_file_is_refused_that_another_server_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    recorder = record(path)

    with pytest.raises(ConfigError, match="in use by another server"):
        record(path)

    recorder.close()


def test_an_earlier_timeline_is_replaced_and_any_other_file_is_not(tmp_path: Path) -> None:
    path, other = tmp_path / "a.json", tmp_path / "notes.txt"
    record(path).close()
    other.write_text("mine")

    record(path).close()
    with pytest.raises(ConfigError, match="exists and is no timeline"):
        record(other)

    assert other.read_text() == "mine"


@pytest.mark.parametrize("place", ["missing/a.json", "missing/", "/dev/null", "/proc/a.json"])
def test_a_place_that_cannot_be_written_is_refused_with_its_name(
    tmp_path: Path, place: str
) -> None:
    path = f"{tmp_path}/{place}" if place[0] != "/" else place

    with pytest.raises(ConfigError, match=f"--afd-trace {path} ") as caught:
        file.check(path)

    assert "choose another" in str(caught.value) or "must exist" in str(caught.value)


@pytest.mark.parametrize("place", ["", "a.json"])
def test_the_check_at_start_leaves_nothing_behind(tmp_path: Path, place: str) -> None:
    file.check(str(tmp_path / place))

    assert list(tmp_path.iterdir()) == []


def test_several_servers_share_a_directory_or_get_their_rank_into_the_name(tmp_path: Path) -> None:
    directory = str(tmp_path)

    assert file.place_of(directory, "mlp-0-ab") == f"{directory}/mlp-0-ab.json"
    assert file.place_of("/x/a.json", "mlp-0-ab") == "/x/a.json"
    assert file.place_of_rank("/x/a.json", 2) == "/x/a.rank2.json"
    assert file.place_of_rank(directory, 2) == directory
