"""Start, reach and stop real servers from a test."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_afd.ports import free_ports

SUPPORT = Path(__file__).parent
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--mem-fraction-static", "0.8", "--max-total-tokens", "8192", "--max-running-requests", "32"),
)
# For what must happen sooner or later, on a machine that is busy with something else, too.
START_TIMEOUT_S = 300.0


def fetch(url: str, body: object = None, timeout_s: float = 120.0) -> tuple[int, Any]:
    """Status and parsed JSON (or text) of a GET, or of a POST where there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            status, text = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode(errors="replace")


def wait_until(
    condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S
) -> None:
    """Poll until `condition` holds; fails the test with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.1)


class Server:
    """One server process and what it printed."""

    def __init__(self, pid: int, port: int, log: Path) -> None:
        self.pid = pid
        self.port = port
        self.log = log
        self.url = f"http://127.0.0.1:{port}"

    def is_alive(self) -> bool:
        """Does the process exist and is it no zombie?"""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rsplit(")", 1)[1].split()[0] != "Z"

    def text(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def get(self, path: str) -> tuple[int, Any]:
        """Status 0 when nothing listens, or what listened ended before it had answered."""
        try:
            return fetch(self.url + path)
        except (OSError, http.client.HTTPException):
            return 0, None

    def wait(
        self,
        path: str,
        accept: Callable[[Any], bool] = lambda body: True,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Until `path` answers 200 with a body that is accepted."""

        def is_there() -> bool:
            if not self.is_alive():
                raise AssertionError(f"server ended while starting:\n{self.text()[-4000:]}")
            status, body = self.get(path)
            return status == 200 and accept(body)

        try:
            wait_until(is_there, f"{path} of port {self.port}", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()[-4000:]}") from None

    def wait_ended(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until the process is gone."""
        wait_until(lambda: not self.is_alive(), f"end of pid {self.pid}", timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """To the process itself, not its children."""
        os.kill(self.pid, number)

    def write_stacks(self) -> None:
        """Have every process of a zygote's server write its stacks into the log."""
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                pid = int(status.parent.name)
                catches = int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16)  # type: ignore[index]
                if os.getpgid(pid) == self.pid and catches >> (signal.SIGUSR2 - 1) & 1:
                    os.kill(pid, signal.SIGUSR2)

    def signal_tree(self, number: int) -> None:
        """To the process and its children at once."""
        os.killpg(self.pid, number)

    def kill_tree(self) -> None:
        """SIGKILL to the process and its children at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole group if that did not end it after a minute."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            self.wait_ended(60)
        self.kill_tree()


class Zygote:
    """Forks servers; see zygote.py."""

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        self._directory = directory
        self._count = 0
        paths = (str(SUPPORT), str(SUPPORT.parents[1]), os.environ.get("PYTHONPATH", ""))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "PYTHONPATH": os.pathsep.join(paths),
            **(environment or {}),
        }
        with (directory / "zygote.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(SUPPORT / "zygote.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        assert self._read() == {"ready": True}

    def start(
        self,
        kind: str,
        argv: Sequence[str],
        *,
        plant: str | None = None,
        env: dict[str, str] | None = None,
    ) -> Server:
        """Fork one server; `--port` is added. It is not waited for."""
        self._count += 1
        port, nccl_port = free_ports(2)
        log = self._directory / f"{self._count:02d}-{kind}-{port}.log"
        more = ["--nccl-port", str(nccl_port)] if kind in ("stock", "afd") else []
        command = {
            "kind": kind,
            "argv": ["--port", str(port), *more, *argv],
            "plant": plant,
            "env": env or {},
            "log": str(log),
        }
        return Server(self._ask(command)["pid"], port, log)

    def close(self) -> None:
        """End the zygote; servers are stopped by those who started them."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # which ends it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self, command: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        is_there, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
        line = self._process.stdout.readline() if is_there else ""
        if not line:
            raise AssertionError((self._directory / "zygote.log").read_text()[-4000:])
        return json.loads(line)


def print_tails(servers: Sequence[Server], num_characters: int = 4000) -> None:
    """What each server printed last, the stacks of its processes included.

    Only for servers of a zygote: others would die of the signal.
    """
    for server in servers:
        server.write_stacks()
    time.sleep(0.5 if servers else 0)
    for server in servers:
        print(f"==== {server.log.name}\n{server.text()[-num_characters:]}", flush=True)


@contextlib.contextmanager
def running(servers: Sequence[Server]) -> Iterator[Sequence[Server]]:
    """End `servers` at the end of the block, whatever happens in it.

    At once: in an orderly stop an attention server looks every five seconds for requests to finish.
    """
    try:
        yield servers
    finally:
        for server in servers:
            server.kill_tree()
        for server in servers:
            server.wait_ended(60)
