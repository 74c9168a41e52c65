"""What rounds are worth, simulated: first come, first served against `Rounds`, on two machines.

No GPU is needed and none is measured: attention and expert times are fits, written down in
test/support/round_simulator.py. Prints one JSON line.

    python benchmark/rounds_simulation.py [--steps 40] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "test" / "support")]  # also where sglang_afd is not installed

from round_simulator import GB200_7_1, H200_6_2, Result, Scene, simulate  # noqa: E402

from sglang_afd.rounds.arrival import ArrivalQueue  # noqa: E402
from sglang_afd.rounds.rounds import Rounds  # noqa: E402
from sglang_afd.rounds.units import UnitSource  # noqa: E402

SCENES = {
    "GB200 Qwen3-235B FP8, 7 attention servers : 1 MLP server": GB200_7_1,
    "H200 Qwen3-30B, 6 attention servers : 2 MLP GPUs": H200_6_2,
}
PREFILLS = (0.0, 0.01, 0.05)


def first_come(layer_ids: Sequence[int]) -> UnitSource:
    """The measure: every exchange is a run of its own."""
    return ArrivalQueue()


POLICIES: dict[str, Callable[[Sequence[int]], UnitSource]] = {
    "first_come": first_come,
    "rounds": Rounds,
}


def measure(scene: Scene, policy: str, seeds: int) -> dict[str, float]:
    """One cell of the table: means over seeds."""
    results = [
        simulate(replace(scene, seed=seed), POLICIES[policy]) for seed in range(1, seeds + 1)
    ]

    def mean(get: Callable[[Result], float]) -> float:
        return round(statistics.fmean(get(result) for result in results), 2)

    return {
        "tokens_per_s_per_gpu": mean(lambda result: result.tokens_per_s_per_gpu),
        "peers_per_run": mean(lambda result: result.peers_per_unit),
        "mlp_busy": mean(lambda result: result.busy),
        "step_p50_ms": mean(lambda result: result.step_p50_ms),
        "step_p99_ms": mean(lambda result: result.step_p99_ms),
        "prefill_ms": mean(lambda result: result.prefill_ms),
    }


def main() -> None:
    """Simulate every cell and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="length of a run in ideal steps")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    rows = [
        {
            "scene": name,
            "prefill_share_of_steps": prefill,
            **{
                policy: measure(
                    replace(scene, prefill=prefill, steps=arguments.steps), policy, arguments.seeds
                )
                for policy in POLICIES
            },
        }
        for name, scene in SCENES.items()
        for prefill in PREFILLS
    ]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    print(
        json.dumps(
            {
                "benchmark": "rounds_simulation",
                "commit": commit,
                "hardware": "none: simulated",
                "steps": arguments.steps,
                "seeds": arguments.seeds,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
