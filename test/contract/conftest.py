"""The transports that the contract holds for; a new one is one more line in `TRANSPORTS`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Both sides of the one-sided exchange wait in this process, where a kernel that is loaded late, or
# has to share its queue, would wait for one that waits; CUDA reads both when it begins.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # looking for a GPU begins nothing

import pytest
import torch
from transports import Fleet, Loopback, Transport, Zmq


def _cuda_ipc(policy: str) -> Callable[[Path], Transport]:
    def make(directory: Path) -> Transport:
        from cuda_ipc_transport import CudaIpc

        from sglang_afd.transport.cuda_ipc.layout import WaitPolicy

        return CudaIpc(WaitPolicy(policy), directory)

    return make


TRANSPORTS: dict[str, Callable[[Path], Transport]] = {
    "loopback": lambda directory: Loopback(),
    "zmq-ipc": lambda directory: Zmq("ipc", directory),
    "zmq-tcp": lambda directory: Zmq("tcp", directory),
    "cuda-ipc-poll": _cuda_ipc("poll"),
    "cuda-ipc-memop": _cuda_ipc("memop"),
}
_ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device"),
)


def _named(prefix: str = "") -> list[object]:
    return [
        pytest.param(name, marks=_ON_GPU if name.startswith("cuda") else ())
        for name in TRANSPORTS
        if name.startswith(prefix)
    ]


@pytest.fixture(params=_named())
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """Ranks and links over one transport."""
    yield from _fleet(request.param, tmp_path)


@pytest.fixture(params=_named("zmq"))
def zmq_fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """The same, over sockets that a stranger can connect to."""
    yield from _fleet(request.param, tmp_path)


def _fleet(name: str, directory: Path) -> Iterator[Fleet]:
    fleet = Fleet(TRANSPORTS[name](directory))
    yield fleet
    fleet.close()
