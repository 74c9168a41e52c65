"""One tree of processes for all GPU tests, and the answers of stock SGLang.

SGLang is imported once and forked into every server. Without a GPU the tests are skipped; with
TEST_DEVICE=cpu those that can run on a CPU do, to find what is wrong with the tests themselves.

Tests that need no server come first; meanwhile SGLang is imported, and the first servers start.
compute-sanitizer runs beside all that, and is asked late. What kills servers comes at the end, and
then the launcher, which wants the whole GPU. On 16 cores and a machine whose kernels are compiled,
in seconds, worked out from phases that were timed one by one:

    0 - 10     pytest begins; SGLang's import (30) and compute-sanitizer begin beside it
    10 - 55    kernels 5, full queue 7, stress 30; the first fourteen servers start
    55 - 100   covering set: one combination in 1 to 5, or as soon as its servers are there
    100 - 120  faults, padding, FP8, hidden states; compute-sanitizer has ended
    120 - 180  restarts: each new MLP server takes 6 to 12
    180 - 195  what is killed
    195 - 285  launch: it imports SGLang anew
    + 30       the contract tests, in a process of their own
    + 45       where no kernel is compiled yet
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_models
import gpu_report
import pytest
from gpu_ahead import Ahead, Key, Setup, Stage
from gpu_fleet import IS_CPU, say
from gpu_oracles import Oracles
from gpu_sanitizer import Sanitizers, find_tool
from servers import Zygote, print_tails

from sglang_afd.fleet.mps import private_mps

_ROOT = Path(__file__).parents[2]
_ORDER = (
    *(
        "test_cuda_ipc_kernels",
        "test_full_queue",
        "test_cuda_ipc_stress",
    ),
    *("test_zygote", "test_covering_set", "test_faults", "test_padding", "test_fp8"),
    *("test_hidden_states", "test_cuda_ipc_sanitizer", "test_restart", "test_rank_restart"),
    "test_fatal_fault",  # may take along every server that lives
    "test_launch",  # plans with all memory, under an MPS daemon of its own: nobody else is there
)
_ENVIRONMENT = {
    "TRITON_F32_DEFAULT": "ieee",  # by default Triton multiplies float32 in TF32
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # or every server forks sixteen compilers
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Deterministic inference cuts prompts at multiples of this; 4096 would never fit a chunk.
    "SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": "128",
}


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known by which servers are started ahead."""
    config.addinivalue_line("markers", "wants(setup): servers of a GPU test; see gpu_ahead.py")


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
    return 1 + _ORDER.index(item.path.stem)


def pytest_sessionstart() -> None:
    """Write down where this runs."""
    gpu_report.begin()


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write down which test runs, for when it never ends."""
    gpu_report.note_start(nodeid)


def pytest_exception_interact() -> None:
    """Say what servers do when a test fails, also by its time limit."""
    _tell()


def pytest_keyboard_interrupt() -> None:
    """The same when all tests are cut off."""
    _tell()


def _tell() -> None:
    for backstage in _backstages:
        print_tails(backstage.ahead.in_use())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how each test went."""
    if "/gpu/" in report.nodeid:
        gpu_report.note_test(report)


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


@dataclass(frozen=True)
class _Backstage:
    """What is prepared while tests run that need no server."""

    zygote: Zygote
    models: Mapping[Key, Path]
    oracles: Oracles
    ahead: Ahead

    def close(self) -> None:
        self.ahead.close()
        self.oracles.close()
        self.zygote.close()


_backstages: list[_Backstage] = []  # of this session, once it is prepared


@pytest.fixture(scope="session", autouse=True)
def _curtain(request: pytest.FixtureRequest) -> None:
    """Begin with what takes long and later tests want."""
    wanted = {name for item in _to_run(request.session.items) for name in item.fixturenames}
    for name in ("_backstage", "sanitizers"):
        if name in wanted:
            request.getfixturevalue(name)


def _to_run(items: Sequence[pytest.Item]) -> list[pytest.Function]:
    functions = [item for item in items if isinstance(item, pytest.Function)]
    return [item for item in functions if item.get_closest_marker("skip") is None]


@pytest.fixture(scope="session")
def sanitizers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sanitizers]:
    """Runs of compute-sanitizer, which began with the first test."""
    with Sanitizers(tmp_path_factory.mktemp("sanitizer"), find_tool()) as sanitizers:
        yield sanitizers


@pytest.fixture(scope="session")
def _backstage(
    mps: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Future[_Backstage]]:
    marks = [item.iter_markers("wants") for item in _to_run(request.session.items)]
    setups = list({mark.args[0].name: mark.args[0] for found in marks for mark in found}.values())
    logs, directory = tmp_path_factory.mktemp("servers"), tmp_path_factory.mktemp("models")
    with ThreadPoolExecutor(1) as pool:
        prepared = pool.submit(_prepare, logs, directory, mps, setups)
        yield prepared
    if prepared.exception() is None:
        prepared.result().close()


def _prepare(
    logs: Path, directory: Path, mps: Mapping[str, str], setups: Sequence[Setup[Any]]
) -> _Backstage:
    say("zygote: importing SGLang")
    paths = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    making = subprocess.Popen(
        [sys.executable, gpu_models.__file__, str(directory)],
        env={**os.environ, "PYTHONPATH": paths},
    )
    zygote = Zygote(logs, {**mps, **_ENVIRONMENT})
    say("zygote: ready")
    if making.wait() != 0:
        zygote.close()
        raise AssertionError(f"gpu_models.py ended with {making.returncode}")
    stage = Stage(zygote, gpu_models.paths(directory), directory)
    oracles = Oracles(zygote, stage.models)
    for key in dict.fromkeys(key for setup in setups for key in setup.stock):
        oracles.start(key)
    ahead = Ahead(stage, setups, count_others=oracles.num_living)
    ahead.fill()
    _backstages.append(_Backstage(zygote, stage.models, oracles, ahead))
    return _backstages[0]


@pytest.fixture(scope="session")
def zygote(_backstage: Future[_Backstage]) -> Zygote:
    """Forks servers."""
    return _backstage.result().zygote


@pytest.fixture(scope="session")
def models(_backstage: Future[_Backstage]) -> Mapping[Key, Path]:
    """A tiny checkpoint for each family and precision."""
    return _backstage.result().models


@pytest.fixture(scope="session")
def oracles(_backstage: Future[_Backstage]) -> Oracles:
    """Stock SGLang on the same GPU; what the selected tests compare with starts at once."""
    return _backstage.result().oracles


@pytest.fixture(scope="session")
def ahead(_backstage: Future[_Backstage]) -> Ahead:
    """Hands out the servers that tests are marked to want."""
    return _backstage.result().ahead
