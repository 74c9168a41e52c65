"""Real servers for the benchmark, started and stopped through the zygote."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap.delays import ENV, DelayFile
from overlap.tiny_model import write_model
from sglang_afd.ports import free_ports

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 30.0
COMMON_FLAGS = ("--dtype", "float32", "--skip-tokenizer-init", "--log-level", "warning")
ATTN_FLAGS = (
    *("--max-total-tokens", "8192", "--max-running-requests", "32", "--mem-fraction-static", "0.8"),
    *("--disable-radix-cache", "--sleep-on-idle"),  # so that each prompt is prefilled whole
)
_METRICS = "sglang_afd_mlp_"


@dataclass(frozen=True)
class Server:
    """One real server and its delays."""

    pid: int
    url: str
    log: Path
    delays: DelayFile

    def get(self, path: str) -> bytes:
        """Body of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            body: bytes = response.read()
        return body

    def counters(self) -> dict[str, float]:
        """The MLP role's metrics without those of single experts."""
        values = (line.rsplit(" ", 1) for line in self.get("/metrics").decode().splitlines())
        return {
            name.split("{")[0].removeprefix(_METRICS): float(value)
            for name, value in values
            if name.startswith(_METRICS) and "expert=" not in name
        }


@dataclass(frozen=True)
class Group:
    """Attention servers on the MLP ranks that they share."""

    attn: list[Server]
    mlp: list[Server]


class Launcher:
    """Owns the zygote, the model and the directory of everything; a context manager."""

    def __init__(self, num_layers: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="bench-overlap-"))
        self._count = 0
        log = (self.directory / "zygote.log").open("wb")
        self._zygote = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "overlap.zygote", str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=self._environment() | {"TMPDIR": str(self.directory)},
            text=True,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C
        )
        log.close()
        try:
            self._model = write_model(self.directory / "model", num_layers)
            self._read()  # it is ready
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End every server and remove the directory; the zygote does both if we cannot."""
        assert self._zygote.stdin is not None and self._zygote.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._zygote.stdin.close()
        try:
            self._zygote.wait(END_TIMEOUT_S)
        finally:
            self._zygote.kill()
            self._zygote.wait()
            self._zygote.stdout.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    @contextlib.contextmanager
    def group(
        self,
        micro_batches: Sequence[int],
        *,
        num_mlp: int = 1,
        mlp_env: dict[str, str] | None = None,
        flags: Sequence[str] = (),
    ) -> Iterator[Group]:
        """An attention server for each number of micro-batches, on `num_mlp` MLP ranks.

        Args:
            micro_batches: Of each attention server.
            num_mlp: How many ranks.
            mlp_env: More environment variables for the ranks.
            flags: More flags for every server.
        """
        ports = free_ports(num_mlp + len(micro_batches))
        leader = f"http://127.0.0.1:{ports[0]}"
        mlp = [
            self._start(
                port,
                *("--role", "mlp", "--ep-size", str(num_mlp), "--afd-ep-rank", str(rank)),
                *("--afd-listen", f"ipc://{self.directory}/{port}.sock"),
                *(("--afd-leader", leader) if rank else ()),
                *flags,
                env=mlp_env or {},
            )
            for rank, port in enumerate(ports[:num_mlp])
        ]
        attn = [
            self._start(
                port,
                *("--role", "attn", "--afd-mlp", leader, *ATTN_FLAGS),
                *("--afd-num-micro-batches", str(number)),
                *flags,
                env={},
            )
            for port, number in zip(ports[num_mlp:], micro_batches, strict=True)
        ]
        try:
            for server in attn:
                self._wait_ready(server)
            yield Group(attn=attn, mlp=mlp)
        finally:
            self._ask({"stop": [server.pid for server in [*attn, *mlp]]})

    def _start(self, port: int, *argv: str, env: dict[str, str]) -> Server:
        self._count += 1
        delays = DelayFile(self.directory / f"{self._count:02d}-{port}.delays")
        log = self.directory / f"{self._count:02d}-{port}.log"
        command = {
            "argv": ["--model-path", str(self._model), *COMMON_FLAGS, "--port", str(port), *argv],
            "env": {ENV: str(delays.path), **env},
            "log": str(log),
        }
        return Server(self._ask(command)["pid"], f"http://127.0.0.1:{port}", log, delays)

    def _wait_ready(self, server: Server) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and _is_running(server.pid):
            try:
                if json.loads(server.get("/afd/v1/status"))["state"] == "ready":
                    server.get("/health")
                    return
            except OSError:
                pass
            time.sleep(0.2)
        logs = sorted(self.directory.glob("*.log"))
        tails = "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
        raise SystemExit(f"bench_overlap: {server.url} did not become ready\n{tails}")

    def _ask(self, command: dict[str, Any]) -> Any:
        assert self._zygote.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._zygote.stdin.write(json.dumps(command) + "\n")
            self._zygote.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._zygote.stdout is not None
        line = self._zygote.stdout.readline()
        if not line:
            log = self.directory / "zygote.log"
            text = log.read_text(errors="replace")[-3000:] if log.exists() else ""
            raise SystemExit(f"bench_overlap: SGLang could not be imported\n{text}")
        return json.loads(line)

    @staticmethod
    def _environment() -> dict[str, str]:
        return os.environ | {
            "OMP_NUM_THREADS": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            "PYTHONPATH": os.pathsep.join(
                (str(ROOT), str(ROOT / "benchmark"), os.environ.get("PYTHONPATH", ""))
            ),
        }


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"
