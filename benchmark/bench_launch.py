"""The MLP side's own time: from a doorbell to the first launch of a step, and for each unit.

Everything of the host is real: the loop, rounds, hub with its sockets, doorbells on a shared page,
descriptors. Only launching a graph is replaced by a note of the time, and a unit is done when the
script says so: one for each turn of the loop, after which its members ring for their next layer, so
that each turn hears every peer, sees one unit end and launches one. All peers ring at once, after
the loop has turned in vain for a while, and announce their next step meanwhile.

Prints one JSON line, times in microseconds by number of peers, p50 and p90 each:

ring_to_launch_us   from the turn that finds the doorbells rung to the first launch, by the
                    milliseconds without a launch before it: caches grow cold meanwhile
unit_us             one turn in the middle of a step
idle_turn_us        one turn in which nothing happens; a ring waits for half of one
reference_us        json.dumps of a small object: how fast this core runs Python at the moment

    python benchmark/bench_launch.py [--steps 200] [--no-rehearsal] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # where sglang_afd is not installed
sys.path.insert(0, str(ROOT / "test" / "support"))

import torch  # noqa: E402
from launch.host_side import LAYERS, HostSide, host_side, quantiles_us  # noqa: E402

PEERS = (1, 2, 4)
WARM_STEPS = 20
GAPS_MS = (1, 3, 9)  # between two steps


def main(argv: Sequence[str]) -> int:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each case")
    parser.add_argument("--no-rehearsal", action="store_true", help="let the caches grow cold")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    options = parser.parse_args(argv)
    result: dict[str, Any] = {"name": "launch", "reference_us": _reference_us(), "peers": {}}
    for num_peers in PEERS:
        with (
            tempfile.TemporaryDirectory() as directory,
            torch.inference_mode(),
            host_side(Path(directory), num_peers, rehearses=not options.no_rehearsal) as side,
        ):
            if options.profile:
                _profile(side, options.steps)
            else:
                result["peers"][num_peers] = _measure(side, options.steps)
    if not options.profile:
        print(json.dumps(result))
    return 0


def _measure(side: HostSide, num_steps: int) -> dict[str, Any]:
    steps = itertools.count(1)
    _steps(side, steps, WARM_STEPS, GAPS_MS[0])
    times = {gap_ms: _steps(side, steps, num_steps, gap_ms) for gap_ms in GAPS_MS}
    last = times[GAPS_MS[-1]]
    return {
        "ring_to_launch_us": {ms: quantiles_us(each.launches_ns) for ms, each in times.items()},
        "unit_us": quantiles_us(last.units_ns),
        "idle_turn_us": quantiles_us(last.idle_ns),
    }


def _steps(side: HostSide, steps: Iterator[int], number: int, gap_ms: int) -> Times:
    times = Times()
    for step in itertools.islice(steps, number):
        _one_step(side, step, times, gap_ms / 1e3)
    return times


@dataclass
class Times:
    """What was measured."""

    launches_ns: list[int] = field(default_factory=list)
    units_ns: list[int] = field(default_factory=list)
    idle_ns: list[int] = field(default_factory=list)


def _one_step(side: HostSide, step: int, times: Times, gap_s: float) -> None:
    loop, device = side.loop, side.device
    until_s = time.monotonic() + gap_s
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
    steps = itertools.count(1)
    _steps(side, steps, WARM_STEPS, GAPS_MS[0])
    profile = cProfile.Profile()
    profile.enable()
    _steps(side, steps, num_steps, GAPS_MS[0])
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
    return quantiles_us(times_ns)[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
