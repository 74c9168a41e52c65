"""Files that a person named may be anything."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from sglang_afd.files import read_file, send_nowhere


def test_a_file_is_read_up_to_the_limit_and_refused_beyond_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")

    assert read_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than"):
        read_file(path, 4)


def test_a_device_without_an_end_is_refused() -> None:
    with pytest.raises(OSError, match="more than 1 MiB"):
        read_file(Path("/dev/zero"), 1 << 20)


def test_a_pipe_without_a_writer_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    assert read_file(path) == b""


def test_a_pipe_with_a_slow_writer_is_read_to_its_end() -> None:
    read_end, write_end = os.pipe()

    def write() -> None:
        with os.fdopen(write_end, "wb") as pipe:
            for part in (b"one ", b"two"):
                pipe.write(part)
                pipe.flush()

    writer = threading.Timer(0.05, write)
    writer.start()

    content = read_file(Path(f"/dev/fd/{read_end}"))

    writer.join()
    os.close(read_end)
    assert content == b"one two"


def test_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        read_file(tmp_path)


def test_a_stream_that_was_sent_nowhere_ends_in_silence_and_leaves_no_descriptor() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stream:
        stream.write("what nobody reads")
        before = len(os.listdir("/proc/self/fd"))

        send_nowhere(stream)

        assert len(os.listdir("/proc/self/fd")) == before
        stream.flush()
