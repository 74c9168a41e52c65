#!/usr/bin/env python3
"""Behaves as nvidia-cuda-mps-control does: a daemon with -d, else a client that sends it commands.

FAKE_MPS=refuses makes -d fail, FAKE_MPS=deaf a daemon that does not quit and ignores SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

MODE = os.environ.get("FAKE_MPS", "")


def main() -> int:
    directory = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", os.environ.get("FAKE_MPS_DEFAULT", ""))
    address = Path(directory) / "control"
    return daemonize(address) if sys.argv[1:] == ["-d"] else send(address, sys.stdin.read())


def daemonize(address: Path) -> int:
    if MODE == "refuses":
        print("Cannot start: insufficient permission", file=sys.stderr)
        return 1
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(address))
    server.listen()
    if os.fork():
        return 0
    os.setsid()
    log = Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]) / "control.log"
    log.write_text(f"visible {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}\n")
    if MODE == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in range(3):
        os.close(number)
    while True:
        connection, _ = server.accept()
        with connection:
            command = connection.recv(1000).decode().strip()
            if command == "get_default_active_thread_percentage":
                connection.sendall(b"100.0\n")
            if command.startswith("quit") and MODE != "deaf":
                return 0


def send(address: Path, command: str) -> int:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(address))
        except OSError:
            print("Cannot find MPS control daemon process", file=sys.stderr)
            return 1
        client.sendall(command.encode())
        sys.stdout.write(client.recv(1000).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
