"""Imports SGLang once and forks the child processes of every block from there.

Commands are JSON lines on standard input, answers go to standard output. When standard input ends,
so does every child. Where the import initialises CUDA, forked children could not use the GPU; then
every child is a fresh interpreter, which costs it the import, and the answer to the first command
says so.
"""

from __future__ import annotations

# NOTE: must precede every import of SGLang; spawned children import this module first, too.
from sglang_afd.upstream import cpu_shim  # isort: skip

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import forked

# What the children would import later, at a second or more each.
_GPU_MODULES = (
    "sglang.srt.layers.attention.flashattention_backend",
    "sglang.srt.layers.attention.triton_backend",
)


class Zygote:
    """The children, and how a new one comes to be."""

    def __init__(self) -> None:
        self._children: set[int] = set()
        self._can_fork = True

    def serve(self) -> None:
        """Until standard input ends."""
        try:
            started_s = time.monotonic()
            self._can_fork = import_sglang()
            gc.collect()
            gc.freeze()  # so that a collection in a child copies no page of this process
            import_s = round(time.monotonic() - started_s, 1)
            _say({"ready": True, "can_fork": self._can_fork, "import_s": import_s})
            for line in sys.stdin:
                _say(self._do(json.loads(line)))
        finally:
            self._stop(sorted(self._children), 0.0)

    def _do(self, command: dict[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "start":
                pid = self._start(command)
                self._children.add(pid)
                return {"pid": pid}
            case "stop":
                codes = self._stop(command["pids"], command["grace_s"], command["patience_s"])
                self._children.difference_update(command["pids"])
                return {"codes": codes}
        raise ValueError(f"unknown command {command}")

    def _start(self, command: dict[str, Any]) -> int:
        if not self._can_fork:
            argv = [sys.executable, "-W", "ignore", "-m", "step.zygote", json.dumps(command)]
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL).pid
        pid = os.fork()
        if pid == 0:
            become_child(command)
        return pid

    def _stop(
        self, pids: Sequence[int], grace_s: float, patience_s: float = 0.0
    ) -> list[int | None]:
        """End processes, and whatever else is in the session of each.

        Args:
            pids: Of children.
            grace_s: Between SIGTERM and SIGKILL.
            patience_s: Before SIGTERM, for those that are about to end.
        """
        _wait_ended(pids, patience_s)
        for pid in pids:
            _signal(pid, signal.SIGTERM)
        _wait_ended(pids, grace_s)
        return [_reap(pid) for pid in pids]


def import_sglang() -> bool:
    """Import what the children need; returns whether they can be forked."""
    if cpu_shim.IS_CPU:
        _import()
        return True
    from step import uninitialised

    with uninitialised.asked_elsewhere():
        _import()
        for module in _GPU_MODULES:
            importlib.import_module(module)
    return not forked.is_cuda_initialised()


def _import() -> None:
    import sglang.benchmark.one_batch
    import sglang.srt.managers.scheduler
    import sglang.srt.model_executor.model_runner  # noqa: F401
    from sglang.srt.models.registry import ModelRegistry

    import sglang_afd.attn.scheduler
    import sglang_afd.mlp.server  # noqa: F401

    ModelRegistry.get_supported_archs()  # imports every model


def become_child(command: dict[str, Any]) -> NoReturn:
    """Run one child in this process, and end it."""
    forked.end_with(lambda: _run_child(command))


def _run_child(command: dict[str, Any]) -> int:
    forked.detach(command["log"])
    from sglang_afd.process import die_with_parent

    os.environ.pop("SGLANG_AFD_PARENT_PID", None)
    die_with_parent()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.environ |= command["env"]
    from step import children

    return children.run(command)


def _say(answer: dict[str, Any]) -> None:
    _answers.write(json.dumps(answer) + "\n")
    _answers.flush()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait_ended(pids: Sequence[int], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not all(map(_has_ended, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reap(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):  # forked a moment ago, in our session still
        os.killpg(pid, signal.SIGKILL)
    _signal(pid, signal.SIGKILL)
    # Not before: until here the number is nobody else's.
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


_answers = sys.stdout

if __name__ == "__main__":
    if len(sys.argv) > 1:
        become_child(json.loads(sys.argv[1]))
    # A child whose hooks fail tells its parent by SIGQUIT, as a scheduler tells its server.
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is no answer
    Zygote().serve()
