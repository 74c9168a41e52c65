"""Whatever the step's thread launches behind a wait on the GPU, another thread can end that wait.

Attaching again and giving a step up both depend on it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import gpu_report
import pytest

from sglang_afd.fleet.mps import NOWHERE

PROGRAM = Path(__file__).parents[1] / "support" / "full_queue.py"
TIMEOUT_S = 60
SERVERS_DO = ("layers", "two_steps", "free", "allocate")
# Launches of what servers keep to a limit for, so that CUDA's own need not be known.
BEYOND = {"launches": 20_000, "replays": 64}
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)

Running = Mapping[str, "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A process for each selected case, all at once; without MPS, so that a kill harms nobody."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    ours = [item for item in items if item.path == request.path]
    root = PROGRAM.parents[2]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    processes = {
        str(item.callspec.params["case"]): subprocess.Popen(
            [sys.executable, str(PROGRAM), str(item.callspec.params["case"])],
            env={**os.environ, **NOWHERE, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for item in ours
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


def _found(running: Running, case: str) -> dict[str, object]:
    output, errors = running[case].communicate(timeout=TIMEOUT_S)
    assert running[case].returncode == 0, errors[-4000:]
    found: dict[str, object] = json.loads(output)
    gpu_report.record(f"behind a wait: {case}", found)
    return found


@pytest.mark.parametrize("case", SERVERS_DO)
def test_a_wait_can_be_ended_while_the_step_goes_on_launching(running: Running, case: str) -> None:
    found = _found(running, case)

    assert found["abort_s"] is not None
    assert found["goes_on"]


@pytest.mark.slow
@pytest.mark.parametrize("case", BEYOND)
def test_what_a_full_queue_holds_up_is_written_down(running: Running, case: str) -> None:
    found = _found(running, case)

    # How much CUDA takes is not said anywhere; whatever it was, all of it was launched or held up.
    assert found["was_held_up"] or found["done"] == BEYOND[case]
