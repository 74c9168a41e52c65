"""Imports SGLang once, plants the delays, and forks real servers from there.

A forked server runs `launch_server` on a real command line; only the start method of SGLang's own
children is changed from spawn to fork, which saves ten seconds and the memory of each. Commands are
JSON lines on standard input. When it ends, whoever ended it, every server ends and the directory of
the benchmark is removed.
"""

from __future__ import annotations

# NOTE: must precede every import of SGLang; spawned children import this module first, too.
import sglang_afd.upstream.cpu_shim  # noqa: F401  # isort: skip

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

GRACE_S = 15.0  # for servers to stop by themselves


def main(directory: str) -> None:
    """Serve commands until standard input ends, then leave nothing behind."""
    servers: set[int] = set()
    try:
        _import_sglang()
        from overlap.planted import plant

        plant()
        _say({"ready": True})
        for line in sys.stdin:
            command = json.loads(line)
            if "stop" in command:
                _stop(command["stop"], GRACE_S)
                servers.difference_update(command["stop"])
                _say({"stopped": command["stop"]})
            else:
                servers.add(pid := _fork(command))
                _say({"pid": pid})
    finally:
        _stop(list(servers), 0.0)
        shutil.rmtree(directory, ignore_errors=True)


def _import_sglang() -> None:
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()  # imports every model


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _fork(command: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        _become_server(command)
    return pid


def _become_server(command: dict[str, Any]) -> None:
    code = 1
    try:
        os.setsid()
        from sglang_afd import launch_server
        from sglang_afd.process import die_with_parent

        die_with_parent()
        log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[assignment]
        os.environ |= command["env"]
        code = launch_server.main(command["argv"])
    except SystemExit as exit_request:
        code = exit_request.code if isinstance(exit_request.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _stop(pids: Sequence[int], grace_s: float) -> None:
    """SIGTERM, and SIGKILL to the whole group of each after a while."""
    deadline_s = time.monotonic() + grace_s
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    while not all(map(_has_ended, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # forked a moment ago, in our group still
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # not before: until then the number is nobody else's


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


if __name__ == "__main__":
    main(sys.argv[1])
