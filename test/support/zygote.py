"""Imports SGLang once and forks servers from there, which saves each of them ten seconds.

Run as a script; commands come as JSON lines on standard input, answers go to standard output. A
forked server is the same code on the same command line as a real one; only the start method of
SGLang's own child processes is changed from spawn to fork. `plant` names a fault from `faults.py`,
to show that a test can fail. With a GPU nothing here initialises CUDA (unborn_cuda.py), so that the
servers can; SIGUSR2 makes a server's processes write their stacks into its log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
from typing import Any, NoReturn

import forked

# NOTE: must precede every import of SGLang.
from sglang_afd.upstream import cpu_shim

# What servers import later, which takes seconds.
_GPU_MODULES = (
    *("sglang_afd.attn.scheduler", "sglang_afd.attn.server", "sglang_afd.mlp.ranks"),
    *("sglang.launch_server", "sglang.srt.layers.attention.flashattention_backend"),
    "sglang.srt.layers.attention.triton_backend",
)


def main() -> None:
    """Serve fork commands until standard input ends."""
    if not cpu_shim.IS_CPU:
        import unborn_cuda

        unborn_cuda.use_nvml()
        unborn_cuda.keep()
    _import_sglang()
    if not cpu_shim.IS_CPU:
        for module in _GPU_MODULES:
            importlib.import_module(module)
        unborn_cuda.check()
    gc.collect()
    gc.freeze()  # so that a collection in a server copies no page of this process
    _say({"ready": True})
    pids: list[int] = []
    for line in sys.stdin:
        command = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become_server(command)
        pids.append(pid)
        _say({"pid": pid})
    for pid in pids:  # none is left, unless the tests were killed
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)


def _import_sglang() -> None:
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401 - imports every model
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _become_server(command: dict[str, Any]) -> NoReturn:
    forked.detach(command["log"])
    faulthandler.register(signal.SIGUSR2)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[assignment]
    os.environ |= command.get("env", {})
    forked.end_with(lambda: _run(command["kind"], command["argv"], command.get("plant")))


def _shorten_leases() -> None:
    """Half of what a rank's death costs a test is its lease; the rules are the same at any length.

    NOTE: must precede the import of the modules that take these numbers over.
    """
    from sglang_afd.mlp import group

    group.LEASE_S, group.RENEW_S = 3.0, 0.6


def _run(kind: str, argv: list[str], plant: str | None) -> int:
    _shorten_leases()
    if plant is not None:
        import faults

        faults.plant(plant)
    if kind == "stock":
        from sglang.launch_server import run_server
        from sglang.srt.server_args import prepare_server_args

        run_server(prepare_server_args(argv))
        return 0
    if kind == "call":
        return int(importlib.import_module(argv[2]).main(argv[3:]))
    if kind == "replay":
        import replay_peer

        return replay_peer.main(argv)
    from sglang_afd import launch_server

    return launch_server.main(argv)


if __name__ == "__main__":
    main()
    os._exit(0)  # not by way of threads that libraries started
