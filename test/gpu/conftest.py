"""One tree of processes for all GPU tests, and the answers of stock SGLang.

SGLang is imported once and forked into every server. Without a GPU the tests are skipped; with
TEST_DEVICE=cpu those that can run on a CPU do, to find what is wrong with the tests themselves.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpu_fleet
import gpu_report
import pytest
from gpu_fleet import IS_CPU, PRECISIONS, Combination, Fleet, say
from gpu_oracles import Key, Oracles
from servers import Zygote

from sglang_afd.fleet.mps import private_mps

# What ends the servers of others comes last.
_ORDER = (
    *("test_zygote", "test_covering_set", "test_faults", "test_padding", "test_fp8"),
    "test_restart",
)
_LAST = ("test_launch", "test_launch_memory", "test_fatal_fault")


def _num_gpus() -> int:
    # NOTE: CUDA, once asked, would have to be initialised in this process.
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except OSError:
        return 0
    return listed.stdout.count("GPU ")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here, put it into order and, without a device, skip it."""
    ours = [item for item in items if "/gpu/" in str(item.path)]
    has_gpu = bool(ours) and (IS_CPU or _num_gpus() > 0)
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs one CUDA device"))
        elif IS_CPU and item.get_closest_marker("also_on_cpu") is None:
            item.add_marker(pytest.mark.skip(reason="needs one CUDA device, and TEST_DEVICE=cpu"))
    items.sort(key=lambda item: _place(item) if item in ours else 0)


def _place(item: pytest.Item) -> int:
    name = item.path.stem
    if name in _LAST:
        return 100 + _LAST.index(name)
    return 1 + _ORDER.index(name) if name in _ORDER else 0


def pytest_sessionstart() -> None:
    """Write down where this runs."""
    gpu_report.begin()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how each test went."""
    if "/gpu/" in report.nodeid:
        gpu_report.note_test(report.nodeid, report.when, report.outcome, report.duration)


@pytest.fixture(scope="session")
def mps() -> Iterator[Mapping[str, str]]:
    """Environment of a private MPS daemon, so that a flag between processes takes microseconds."""
    if IS_CPU:
        yield {}
        return
    with private_mps() as mps:
        if mps.environment is None:
            say(f"no MPS, so everything will be slow: {mps.reason}")
        gpu_report.record("mps", mps.reason or "private daemon")
        yield mps.environment or {}
    gpu_report.record("what was wrong when the MPS daemon was stopped", mps.problems)


@pytest.fixture(scope="session")
def _building(
    mps: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Zygote, Mapping[Key, Path]]]:
    """The zygote imports SGLang while the checkpoints are made."""
    directory = tmp_path_factory.mktemp("models")
    environment = {
        **mps,
        "TRITON_F32_DEFAULT": "ieee",  # by default Triton multiplies float32 in TF32
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # or every server forks sixteen compilers
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Deterministic inference cuts prompts at multiples of this; 4096 would never fit a chunk.
        "SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": "128",
    }
    say("zygote: importing SGLang")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(Zygote, tmp_path_factory.mktemp("servers"), environment)
        models = {
            (family, name): make(
                directory / f"{family}-{name}",
                hidden_size=precision.hidden_size,
                dtype="float32" if IS_CPU else precision.dtype,
            )
            for name, precision in PRECISIONS.items()
            for family, make in gpu_fleet.FAMILIES.items()
        }
        say("checkpoints: made")
        zygote = starting.result()
    say("zygote: ready")
    yield zygote, models
    zygote.close()


@pytest.fixture(scope="session")
def zygote(_building: tuple[Zygote, Mapping[Key, Path]]) -> Zygote:
    """Forks servers."""
    return _building[0]


@pytest.fixture(scope="session")
def models(_building: tuple[Zygote, Mapping[Key, Path]]) -> Mapping[Key, Path]:
    """A tiny checkpoint for each family and precision."""
    return _building[1]


def _combinations(items: Sequence[pytest.Item]) -> list[Combination]:
    """Those of the tests that were selected, in their order."""
    parameters = (item.callspec.params for item in items if hasattr(item, "callspec"))
    found = (params.get("combination") for params in parameters)
    return list(dict.fromkeys(each for each in found if isinstance(each, Combination)))


@pytest.fixture(scope="session")
def oracles(
    zygote: Zygote, models: Mapping[Key, Path], request: pytest.FixtureRequest
) -> Iterator[Oracles]:
    """Stock SGLang on the same GPU; servers for all selected tests start at once."""
    oracles = Oracles(zygote, models)
    for each in _combinations(request.session.items):
        oracles.start((each.family, each.precision))
    yield oracles
    oracles.close()


class Fleets:
    """Starts the servers of the next combination while the tests of one run."""

    def __init__(
        self, zygote: Zygote, models: Mapping[Key, Path], combinations: list[Combination]
    ) -> None:
        self._zygote, self._models = zygote, models
        self._to_come = combinations
        self._started: dict[Combination, Fleet] = {}

    def start(self, combination: Combination) -> Fleet:
        """Start it, unless it was."""
        if combination not in self._started:
            model = self._models[combination.family, combination.precision]
            self._started[combination] = gpu_fleet.start_fleet(self._zygote, model, combination)
        return self._started[combination]

    def take(self, combination: Combination) -> Fleet:
        """The fleet, and the next one on its way; the caller ends it."""
        fleet = self.start(combination)
        del self._started[combination]
        if combination in self._to_come:
            del self._to_come[: self._to_come.index(combination) + 1]
        if self._to_come and os.environ.get("TEST_AHEAD", "1") == "1":
            self.start(self._to_come[0])
        return fleet

    def close(self) -> None:
        """End what nobody took."""
        for fleet in self._started.values():
            for server in fleet.servers:
                server.kill_tree()


@pytest.fixture(scope="session")
def fleets(
    zygote: Zygote, models: Mapping[Key, Path], request: pytest.FixtureRequest
) -> Iterator[Fleets]:
    """Hands out fleets in the order of the selected tests."""
    fleets = Fleets(zygote, models, _combinations(request.session.items))
    yield fleets
    fleets.close()
