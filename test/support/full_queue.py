"""Ends a wait on the GPU in one thread while another one fills CUDA's queue behind that wait.

`python full_queue.py CASE` prints a JSON line: how many launches went through, whether the
launching thread was held up, and how long `Slab.abort` took, null where it did not return. Run in a
process of its own, which is given up where it hangs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
from one_sided import Inputs, Rank, attached_slab, make_rows, make_shape, send, weigh

from sglang_afd.attn.launch_limit import LaunchLimit
from sglang_afd.transport.cuda_ipc.slab import Slab

FILL_S = 2.0  # after which whatever is held up has been for long
ABORT_S = 10.0
NODES = 800  # of a graph of one decode step
MIB = 1 << 20


class Launcher:
    """One thread's launches behind a wait that nobody answers."""

    def __init__(self, slab: Slab, inputs: Inputs) -> None:
        self._slab, self._inputs = slab, inputs
        self._stream = torch.cuda.Stream()
        self._values = torch.zeros(16, device="cuda")
        self._spare: torch.Tensor | None = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            for _ in range(NODES):
                self._values += 1
        torch.cuda.synchronize()
        self.num_done = 0

    def run(self, case: Callable[[Launcher], None]) -> None:
        """Wait on the GPU, and go on launching."""
        with torch.cuda.stream(self._stream):
            self.exchange()
            case(self)

    def exchange(self) -> None:
        """Send, and wait for the answer."""
        send(self._slab, 0, 3, self._inputs)
        self._slab.combine(0, 8)

    def layers(self) -> None:
        """An eager step as attention servers launch it."""
        limit = LaunchLimit()
        for _ in range(200):
            for _ in range(20):
                self._values.add_(1)
            limit.launched()
            self.num_done += 1

    def launches(self) -> None:
        """Without a limit."""
        for _ in range(20_000):
            self._values.add_(1)
            self.num_done += 1

    def two_steps(self) -> None:
        """As many steps as SGLang's overlap scheduler has in flight."""
        self._replay(2)

    def replays(self) -> None:
        """More."""
        self._replay(64)

    def free(self) -> None:
        """As SGLang's endpoint does that forgets prefixes, and torch where memory runs out."""
        self._spare = None
        torch.cuda.empty_cache()
        self.num_done += 1

    def allocate(self) -> None:
        """Memory that torch does not have yet."""
        for size in range(64):
            torch.empty((64 + size) * MIB, dtype=torch.uint8, device="cuda")
            self.num_done += 1

    def _replay(self, number: int) -> None:
        for _ in range(number):
            self._graph.replay()
            self.num_done += 1


CASES: dict[str, Callable[[Launcher], None]] = {
    "layers": Launcher.layers,
    "two_steps": Launcher.two_steps,
    "free": Launcher.free,
    "allocate": Launcher.allocate,
    "launches": Launcher.launches,
    "replays": Launcher.replays,
}


def main(argv: Sequence[str]) -> int:
    """See the module."""
    shape = make_shape()
    slab, _ = attached_slab(shape, [Rank(shape, weigh)])
    launcher = Launcher(slab, make_rows(shape, 8, seed=1))
    worker = threading.Thread(target=launcher.run, args=(CASES[argv[0]],), daemon=True)
    worker.start()
    worker.join(FILL_S)
    found: dict[str, object] = {"done": launcher.num_done, "was_held_up": worker.is_alive()}
    found["abort_s"] = _time_of(slab.abort)
    stop_s = time.monotonic() + ABORT_S
    while found["abort_s"] is not None and worker.is_alive() and time.monotonic() < stop_s:
        slab.abort()  # as the guard of a step does until the step has ended
        worker.join(0.01)
    found["goes_on"] = not worker.is_alive()
    print(json.dumps(found), flush=True)
    os._exit(0)  # whatever still waits


def _time_of(call: Callable[[], None]) -> float | None:
    took_s: list[float] = []

    def run() -> None:
        started_s = time.monotonic()
        call()
        took_s.append(time.monotonic() - started_s)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ABORT_S)
    return round(took_s[0], 4) if took_s else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
