"""The processes of the benchmark: the fake server, the routers, and the CPU time that they used."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from router.load import HOST, short
from sglang_afd.ports import free_ports

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 40.0
OURS = "sgl_router_afd"
DIRECT = "direct"
# Where each comes from, and how it is started in front of one server.
OTHERS = {
    "sglang-router": (
        *("-m", "sglang_router.launch_router", "--worker-urls", "{upstream}", "--host", HOST),
        *("--port", "{port}", "--policy", "round_robin", "--prometheus-port", "{other_port}"),
        *("--log-level", "warn"),
    ),
    "smg": (
        *("-m", "smg.launch_router", "--worker-urls", "{upstream}", "--host", HOST),
        *("--port", "{port}", "--policy", "round_robin", "--prometheus-port", "{other_port}"),
        *("--log-level", "warn"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something to send load to."""

    name: str
    version: str
    port: int
    pid: int

    def cpu_s(self) -> float:
        """User and system time of its whole process tree so far."""
        return sum(_own_cpu_s(pid) for pid in tree(self.pid))


def tree(pid: int) -> list[int]:
    """The process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for known in found:
        found.extend(children.get(known, ()))
    return found


def _own_cpu_s(pid: int) -> float:
    # stat counts hundredths of a second only; all threads live as long as their process.
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total_ns += int(task.read_text().split()[0])
    return total_ns / 1e9


@contextlib.contextmanager
def fake_server(*flags: str) -> Iterator[Target]:
    """Run the fake attention server."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("upstream.py")), *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield Target(name=DIRECT, version="", port=port, pid=process.pid)
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def running(
    name: str, version: str, command: Sequence[str], upstream: Target, log: Path
) -> Iterator[Target]:
    """Run one router, and wait until it answers a request."""
    port, other_port = free_ports(2)
    words = {"upstream": f"http://{HOST}:{upstream.port}", "port": port, "other_port": other_port}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [word.format(**words) for word in command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _wait_until_it_answers(name, process, port, log)
        yield Target(name=name, version=version, port=port, pid=process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def installed(others_python: str) -> dict[str, tuple[str, list[str]]]:
    """The version and command of every other router that can be run.

    Args:
        others_python: The Python that has them; "" looks in this one and then on PATH.
    """
    found: dict[str, tuple[str, list[str]]] = {}
    for name, command in OTHERS.items():
        for python in [others_python] if others_python else _pythons_for(name):
            if version := _version_in(python, name):
                found[name] = (version, [python, *command])
                break
    return found


def ours(flags: Sequence[str]) -> list[str]:
    """The command of this project's router."""
    own = ("--attn", "{upstream}", "--host", HOST, "--port", "{port}", "--log-level", "warning")
    return [sys.executable, "-m", "sgl_router_afd.launch_router", *own, *flags]


def _pythons_for(name: str) -> Iterator[str]:
    yield sys.executable
    if script := shutil.which(name):
        beside = Path(script).resolve().with_name("python")
        if beside.exists():
            yield str(beside)


def _version_in(python: str, package: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _wait_until_it_answers(
    name: str, process: subprocess.Popen[bytes], port: int, log: Path
) -> None:
    request = urllib.request.Request(
        f"http://{HOST}:{port}{short().path}", short().body, {"Content-Type": "application/json"}
    )
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError):
            with urllib.request.urlopen(request, timeout=5) as answer:
                json.load(answer)
            return
        time.sleep(0.05)
    tail = log.read_text(errors="replace")[-3000:]
    raise SystemExit(f"{name} did not answer within {START_TIMEOUT_S:g} s; its log ends:\n{tail}")
