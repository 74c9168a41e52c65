"""The MLP side's own time: from a doorbell to the first launch of a step, and for each unit.

Everything of the host is real: the loop, rounds, hub with its sockets, doorbells on a shared page,
descriptors. Only launching a graph is replaced by a note of the time, and a unit is done when the
script says so: one for each turn of the loop, after which its members ring for their next layer, so
that each turn hears every peer, sees one unit end and launches one. All peers ring at once, after
the loop has turned in vain for a while, and announce their next step meanwhile.

Prints one JSON line, times in microseconds by number of peers:

ring_to_launch_us   from the turn that finds the doorbells rung to the first launch (p50 and p90)
unit_us             one turn in the middle of a step
idle_turn_us        one turn in which nothing happens; a ring waits for half of one
reference_us        json.dumps of a small object: how fast this core runs Python at the moment
in_reference        (ring_to_launch, unit, idle_turn) as multiples of that

    python benchmark/bench_launch.py [--steps 200] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # where sglang_afd is not installed
sys.path.insert(0, str(ROOT / "test" / "support"))

import torch
from launch.host_side import LAYERS, HostSide, host_side, median_us

PEERS = (1, 2, 4)
WARM_STEPS = 20
GAP_S = 0.003  # between two steps


def main(argv: Sequence[str]) -> int:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each case")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    options = parser.parse_args(argv)
    result: dict[str, Any] = {"name": "launch", "reference_us": _reference_us(), "peers": {}}
    for num_peers in PEERS:
        with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
            with host_side(Path(directory), num_peers) as side:
                if options.profile:
                    _profile(side, options.steps)
                else:
                    result["peers"][num_peers] = _measure(side, options.steps)
    for measured in result["peers"].values():
        measured["in_reference"] = [
            round(measured[name][0] / result["reference_us"], 2)
            for name in ("ring_to_launch_us", "unit_us", "idle_turn_us")
        ]
    if not options.profile:
        print(json.dumps(result))
    return 0


def _measure(side: HostSide, num_steps: int) -> dict[str, Any]:
    times = _Times()
    for step in range(1, WARM_STEPS + num_steps + 1):
        if step == WARM_STEPS + 1:
            times = _Times()
        _one_step(side, step, times)
    return {
        "ring_to_launch_us": times.quantiles("launches_ns"),
        "unit_us": times.quantiles("units_ns"),
        "idle_turn_us": times.quantiles("idle_ns"),
    }


class _Times:
    def __init__(self) -> None:
        self.launches_ns: list[int] = []
        self.units_ns: list[int] = []
        self.idle_ns: list[int] = []

    def quantiles(self, name: str) -> tuple[float, float]:
        times_ns = getattr(self, name)
        return median_us(times_ns), median_us(times_ns, 0.9)


def _one_step(side: HostSide, step: int, times: _Times) -> None:
    loop, device = side.loop, side.device
    until_s = time.monotonic() + GAP_S
    while time.monotonic() < until_s:
        started_ns = time.perf_counter_ns()
        loop.turn()
        times.idle_ns.append(time.perf_counter_ns() - started_ns)
    device.launched_ns.clear()
    for attn in side.attns:
        attn.ring(step, 0)
    started_ns = time.perf_counter_ns()
    loop.turn()
    times.launches_ns.append(device.launched_ns[0] - started_ns)
    for layer in range(1, len(LAYERS) + 1):
        device.finish_one()
        for attn in side.attns:
            if layer < len(LAYERS):
                attn.ring(step, layer)
            if layer == 2:
                attn.announce(step + 1)
        started_ns = time.perf_counter_ns()
        loop.turn()
        times.units_ns.append(time.perf_counter_ns() - started_ns)
    if len(device.launched_ns) != len(LAYERS) or device.num_done != device.num_submitted:
        raise RuntimeError(
            f"a step of {len(LAYERS)} layers took {len(device.launched_ns)} launches; a round was "
            f"not whole, so that these times mean nothing"
        )


def _profile(side: HostSide, num_steps: int) -> None:
    times = _Times()
    for step in range(1, WARM_STEPS):
        _one_step(side, step, times)
    profile = cProfile.Profile()
    profile.enable()
    for step in range(WARM_STEPS, WARM_STEPS + num_steps):
        _one_step(side, step, times)
    profile.disable()
    print(f"{len(side.attns)} peers", file=sys.stderr)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)


def _reference_us() -> float:
    value = {"numbers": list(range(20)), "text": "some words"}
    times_ns = []
    for _ in range(2000):
        started_ns = time.perf_counter_ns()
        json.dumps(value)
        times_ns.append(time.perf_counter_ns() - started_ns)
    return median_us(times_ns)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
