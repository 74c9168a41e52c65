from __future__ import annotations

import os
import socket
from pathlib import Path

from sglang_afd.mlp.private_address import private_ipc_address
from sglang_afd.transport.private_path import remove_leftovers


def _listen(directory: Path) -> socket.socket:
    directory.mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "exchange"))
    listener.listen()
    os.utime(directory, (0, 0))
    return listener


def test_the_default_address_is_in_a_directory_of_ones_own() -> None:
    directory = Path(private_ipc_address().removeprefix("ipc://")).parent

    assert directory.stat().st_mode & 0o777 == 0o700


def test_what_dead_servers_left_is_removed_and_live_ones_are_not(tmp_path: Path) -> None:
    _listen(tmp_path / "sglang-afd-dead").close()
    (tmp_path / "sglang-afd-new").mkdir()
    _listen(tmp_path / "sglang-afd-young").close()
    os.utime(tmp_path / "sglang-afd-young")
    with _listen(tmp_path / "sglang-afd-live"):
        remove_leftovers(tmp_path, "exchange")

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "sglang-afd-live",
        "sglang-afd-new",
        "sglang-afd-young",
    ]
