"""A router process and real servers that register with it, started and restarted by name."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import fleet
from servers import CPU_FLAGS, START_TIMEOUT_S, Server, Zygote, fetch, wait_until

from sglang_afd.ports import free_ports


class RoutedFleet:
    """Ended with the block, servers that a test stopped or replaced among them.

    Args:
        zygote: Forks the servers.
        model: Checkpoint of both roles.
        directory: For the router's log and state.
        router_flags: More flags of every router that is started here.
        host: Address that everybody listens on.
    """

    def __init__(
        self,
        zygote: Zygote,
        model: Path,
        directory: Path,
        *,
        router_flags: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.model = model
        self.servers: dict[str, Server] = {}
        self._zygote = zygote
        self._directory = directory
        self._router_flags = router_flags
        self._host = host
        self._started: list[Server] = []
        self._routers: list[subprocess.Popen[bytes]] = []
        self.router_port = free_ports(1)[0]
        self.url = self._url(self.router_port)
        self.router_log = directory / f"router-{self.router_port}.log"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for server in self._started:
            server.kill_tree()
        for process in self._routers:
            process.kill()
            process.wait()
        for server in self._started:
            server.wait_ended()

    @property
    def address(self) -> tuple[str, int]:
        """Of the router."""
        return self._host, self.router_port

    def start_router(self, *flags: str) -> subprocess.Popen[bytes]:
        """On the same port each time; not waited for."""
        command = [
            *(sys.executable, "-m", "sgl_router_afd.launch_router", "--host", self._host),
            *("--port", str(self.router_port), *self._router_flags, *flags),
        ]
        with self.router_log.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._routers.append(process)
        return process

    def kill_router(self) -> None:
        """SIGKILL to the process that was started last; its relay processes end by themselves."""
        self._routers[-1].kill()
        self._routers[-1].wait()

    def start_attn(self, name: str, *flags: str, model: Path | None = None) -> Server:
        """An attention server that is told of the router alone; not waited for."""
        argv = [
            *("--role", "attn", "--model-path", str(model or self.model), *CPU_FLAGS),
            *(*fleet.FLAGS, "--afd-attach-timeout", f"{2 * START_TIMEOUT_S:g}"),
        ]
        return self._start(name, argv, flags)

    def start_mlp(
        self, name: str, *flags: str, rank: int = 0, num_ranks: int = 1, model: Path | None = None
    ) -> Server:
        """The same of an MLP rank."""
        argv = [
            *("--role", "mlp", "--model-path", str(model or self.model), "--dtype", "float32"),
            *("--ep-size", str(num_ranks), "--afd-ep-rank", str(rank)),
        ]
        return self._start(name, argv, flags)

    def groups(self) -> Any:
        """What the router says of everything; empty while it does not answer."""
        try:
            status, answer = fetch(f"{self.url}/afd/v1/groups")
        except (OSError, http.client.HTTPException):
            return {"groups": [], "unplaced": [], "events": []}
        assert status == 200, answer
        return answer

    def group(self, index: int = 0) -> Any:
        """One group, or something like one that is not there yet."""
        groups = self.groups()["groups"]
        none = {"name": "", "state": "", "reason": "", "epoch": 0, "attn": [], "mlp": []}
        return groups[index] if index < len(groups) else none

    def standing(self, name: str) -> tuple[str, str]:
        """Of a server by its name here, with the reason; empty if the router does not know it."""
        for row in self.rows():
            if row["server_id"] == name:
                return row["standing"], row["reason"]
        return "", ""

    def rows(self) -> list[Any]:
        """All servers, as the router shows them."""
        answer = self.groups()
        groups = [*(group["attn"] + group["mlp"] for group in answer["groups"])]
        return [*answer["unplaced"], *(row for rows in groups for row in rows)]

    def wait(
        self, what: str, claim: Callable[[], bool], timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """Until a claim holds; a failure shows what the router knows and logged."""
        try:
            wait_until(claim, what, timeout_s)
        except AssertionError as error:
            shown = json.dumps(self.groups(), indent=1)
            log = self.router_log.read_text(errors="replace")
            raise AssertionError(f"{error}\n{shown[:6000]}\n{log[-4000:]}") from None

    def wait_serving(self, *names: str) -> None:
        """Until these servers serve, and their groups are ready."""

        def is_so() -> bool:
            answer = self.groups()
            serving = {
                row["server_id"]
                for group in answer["groups"]
                if group["state"] == "ready"
                for row in group["attn"] + group["mlp"]
                if row["standing"] == "serving"
            }
            return serving >= set(names)

        self.wait(f"{', '.join(names)} serve", is_so)

    def wait_told(self, name: str) -> None:
        """Until a server tells who it is: it has started, and may wait for others."""
        server = self.servers[name]
        self.wait(f"{name} tells", lambda: server.get("/afd/v1/registration")[0] == 200)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """One request to the router's API; None where the answer has no body."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=120) as response:
            text = response.read()
        return response.status, json.loads(text) if text else None

    def logs(self) -> list[Path]:
        """Of everybody."""
        return [self.router_log, *(server.log for server in self._started)]

    def _start(self, name: str, argv: Sequence[str], flags: Sequence[str]) -> Server:
        """Under the port that the server of this name had before, if there was one."""
        before = self.servers.get(name)
        port = before.port if before is not None else free_ports(1)[0]
        whole = [
            *(*argv, "--afd-max-rows", str(fleet.MAX_ROWS), "--afd-router", self.url),
            *("--afd-server-id", name, "--host", self._host, *flags, "--port", str(port)),
        ]
        forked = self._zygote.start("afd", whole)
        server = Server(forked.pid, port, forked.log)
        server.url = self._url(port)
        self.servers[name] = server
        self._started.append(server)
        return server

    def _url(self, port: int) -> str:
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"
