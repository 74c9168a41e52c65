"""Runs a program of the exchange without a GPU: `python program_on_cpu.py PROGRAM [ARGUMENT...]`.

What cuda_on_cpu.py does for tests is done for whole programs and the processes that they start, so
that mistakes of a program itself are found before a GPU is held. A captured graph is the list of
its launches, whatever torch itself computes in it left out. Without an order between streams: a
launch that waits for another process holds up its own.

COLD_BYTES says how far apart the benchmark's buffers are; PLANT is run before the program.
"""

from __future__ import annotations

import ctypes
import functools
import os
import runpy
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test" / "support"), str(ROOT / "benchmark")]

import cuda_on_cpu  # noqa: E402 - from the path above
import torch  # noqa: E402
from exchange import attn_side, stamps  # noqa: E402

from sglang_afd.transport.cuda_ipc import (  # noqa: E402
    hub,
    kernels,
    link,
    peer_table,
    slab,
    units,
)

PATIENCE_S = 20.0
_MAKERS = ("Generator", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")


class Graph:
    """A torch.cuda.CUDAGraph."""

    captured: Graph | None = None

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []

    def replay(self) -> None:
        for launch in self.launches:
            launch()


@contextmanager
def capture(graph: Graph, stream: object = None) -> Iterator[None]:
    """As torch.cuda.graph."""
    Graph.captured = graph
    try:
        yield
    finally:
        Graph.captured = None


def do(launch: Callable[[], None]) -> None:
    """Now, or when the graph is replayed that is captured."""
    if Graph.captured is None:
        launch()
    else:
        Graph.captured.launches.append(launch)


class Stream(cuda_on_cpu.Stream):
    """Its work is done as soon as it is asked for."""

    def wait_stream(self, other: object) -> None:
        """The other one's work is done."""


class Event:
    """When it was recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at_s = 0.0

    def record(self, stream: object = None) -> None:
        self._at_s = time.monotonic()

    def synchronize(self) -> None:
        """What came before is done."""

    def elapsed_time(self, other: Event) -> float:
        return (other._at_s - self._at_s) * 1000


class Clock:
    """The module of stamps.py: one kernel that writes the time."""

    def __init__(self, source: str, name: str, device: int, definitions: dict[str, int]) -> None:
        assert (name, definitions) == ("stamp.cu", {})

    def function(self, name: str) -> Callable[[int, int, list[Any]], None]:
        def stamp(grid: int, block: int, values: list[Any]) -> None:
            ctypes.c_uint64.from_address(values[0].value).value = time.monotonic_ns()

        return stamp


def wait_value(stream: int, address: int, value: int) -> None:
    """See `driver.wait_value`."""
    word = ctypes.c_uint32.from_address(address)

    def wait() -> None:
        stop_s = time.monotonic() + PATIENCE_S
        while word.value != value:
            if time.monotonic() > stop_s:
                raise RuntimeError(f"a word did not become {value}")
            os.sched_yield()

    do(wait)


def replace_cuda(directory: Path) -> None:
    """In the modules of the exchange, and in torch."""

    @functools.cache
    def compiled(device: int, dtype: str) -> cuda_on_cpu.Kernels:
        place = directory / dtype
        place.mkdir()
        return cuda_on_cpu.Kernels(cuda_on_cpu.source(), dtype, place)

    driver: Any = cuda_on_cpu
    launch_now = cuda_on_cpu.launch
    driver.launch = lambda *launch: do(lambda: launch_now(*launch))
    driver.wait_value, driver.Module = wait_value, Clock
    kernels.module = compiled
    kernels.has_fp8 = lambda device: True
    for module in (slab, peer_table, units, stamps):
        module.driver = driver  # type: ignore[attr-defined]
    for module in (slab, peer_table, hub, link):
        module.own_stream = lambda device, is_urgent=False: Stream()  # type: ignore[attr-defined]
    _replace_torch()


def _replace_torch() -> None:
    cuda: Any = torch.cuda
    cuda.CUDAGraph, cuda.graph = Graph, capture
    cuda.Stream, cuda.Event = Stream, Event
    cuda.stream = lambda stream: nullcontext()
    cuda.current_stream = lambda device=0: Stream()
    cuda.synchronize = cuda.set_device = lambda device=0: None
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda device=0: "none"
    cuda._sleep = lambda cycles: None
    torch.Tensor.cuda = lambda self: self  # type: ignore[assignment]
    for name in _MAKERS:
        setattr(torch, name, functools.partial(_make, getattr(torch, name)))


def _make(real: Any, *args: Any, device: str = "", pin_memory: bool = False, **rest: Any) -> Any:
    return real(*args, **rest)


def _as_python(directory: Path) -> str:
    """What runs programs like this one, for those that start others."""
    real, this = shlex.quote(sys.executable), shlex.quote(__file__)
    script = directory / "python"
    script.write_text(
        f'#!/bin/sh\ncase $1 in -*) exec {real} "$@" ;; esac\nexec {real} {this} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def main() -> None:
    """See the module."""
    with tempfile.TemporaryDirectory(prefix="on-cpu-") as name:
        replace_cuda(Path(name))
        sys.executable = _as_python(Path(name))
        attn_side.COLD_BYTES = int(os.environ.get("COLD_BYTES", "4096"))
        exec(os.environ.get("PLANT", ""), {})
        sys.argv = sys.argv[1:]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
