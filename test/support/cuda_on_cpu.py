"""Both sides of the one-sided exchange without a GPU: the same classes and kernels, in host memory.

`exchange.cu` is compiled as C++ (cuda_on_cpu.h), and what slab.py, peer_table.py and units.py ask
of CUDA and of torch's GPU half is done on the host, at once.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_afd.transport.cuda_ipc.kernels import definitions
from sglang_afd.transport.cuda_ipc.layout import PAGE_BYTES

_CAPABILITY = (9, 0)  # of the GPU whose every feature is there
_HERE = Path(__file__).parent
_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__maxnreg__\(\d+\)\s*)?(\w+)\(')


def source() -> str:
    """exchange.cu, to be compiled as it is, or with a fault in it."""
    return resources.files("sglang_afd.transport.cuda_ipc").joinpath("exchange.cu").read_text()


class Kernels:
    """The kernels of one source for rows of one dtype, as `driver.Module` has them.

    Args:
        text: The source.
        dtype: A key of ITEMSIZES.
        directory: For what the compiler makes.
    """

    def __init__(self, text: str, dtype: str, directory: Path) -> None:
        names = _KERNEL.findall(text)
        (directory / "exchange.cu").write_text(text)
        (directory / "main.cpp").write_text(
            '#include "cuda_on_cpu.h"\nnamespace exchange {\n#include "exchange.cu"\n}\n'
            + "".join(f"KERNEL({name})\n" for name in names)
        )
        options = ["-O0", "-std=c++20", "-shared", "-fPIC", "-ffp-contract=off", f"-I{_HERE}"]
        options += [f"-D{name}={value}" for name, value in definitions(dtype, _CAPABILITY).items()]
        made = directory / "exchange.so"
        command = ["g++", *options, str(directory / "main.cpp"), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"exchange.cu does not compile as C++: {done.stderr}")
        self._library = ctypes.CDLL(str(made))
        self._num_launched = 0

    def function(self, name: str) -> Any:
        """One kernel; each launch has another order of blocks and threads."""
        function = self._library[f"launch_{name}"]
        function.restype = ctypes.c_char_p

        def launch(grid: int, block: int, values: list[Any]) -> None:
            self._num_launched += 1
            sizes = (ctypes.c_uint32 * len(values))(*map(ctypes.sizeof, values))
            places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            seed = ctypes.c_uint64(self._num_launched)
            error = function(grid, block, seed, len(values), sizes, places)
            if error:
                raise RuntimeError(f"{name}: {error.decode()}")

        return launch


# What stands in for the names of `driver`.


def launch(
    function: Any,
    stream: int,
    grid: int,
    block: int,
    arguments: tuple[tuple[Any, ...], tuple[Any, ...]],
) -> None:
    """See `driver.launch`; done when it returns."""
    function(grid, block, [kind(value) for value, kind in zip(*arguments, strict=True)])


class SharedMemory:
    """See `driver.SharedMemory`."""

    def __init__(self, num_bytes: int, device: int, descriptor: int | None = None) -> None:
        self.num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        if descriptor is None:
            self._descriptor = os.memfd_create("slab", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, self.num_bytes)
        else:
            self._descriptor = os.dup(descriptor)
        self._free = weakref.finalize(self, os.close, self._descriptor)
        self._bytes = torch.frombuffer(
            mmap.mmap(self._descriptor, self.num_bytes), dtype=torch.uint8
        )
        self.address = self._bytes.data_ptr()

    def export(self) -> int:
        """A file descriptor that names this memory; the caller closes it."""
        return os.dup(self._descriptor)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on this memory."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[offset : offset + num_bytes].view(dtype).view(shape)

    def close(self) -> None:
        """The memory goes with its last view; idempotent."""
        self._free()
        self.address = 0


class SharedPage(SharedMemory):
    """See `driver.SharedPage`."""

    @property
    def descriptor(self) -> int:
        """Names the page."""
        return self._descriptor


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """See `driver.on_device`."""
    yield


def current_stream(device: int) -> int:
    """See `driver.current_stream`."""
    return 0


def synchronize(stream: int) -> None:
    """See `driver.synchronize`."""


def set_words(stream: int, address: int, value: int, number: int = 1) -> None:
    """See `driver.set_words`."""
    (ctypes.c_uint32 * number).from_address(address)[:] = [value] * number


# What stands in for torch.


class Stream:
    """A stream whose work is done as soon as it is asked for."""

    cuda_stream = 0

    def synchronize(self) -> None:
        """Nothing is left to be waited for."""

    def record(self) -> None:
        """The same of an event."""


def own_stream(device: int, *, is_urgent: bool = False) -> Stream:
    """See `streams.own_stream`."""
    return Stream()


class HostTorch:
    """torch, but that tensors for a GPU are made in host memory."""

    cuda = SimpleNamespace(
        Event=Stream,
        Stream=Stream,
        current_stream=lambda device=0: Stream(),
        stream=lambda stream: nullcontext(),
        synchronize=lambda device=0: None,
    )

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name in ("Generator", "full", "rand", "randint", "randn", "zeros"):
            return functools.partial(_make_on_host, found)
        return found


def _make_on_host(
    make: Any, *args: Any, device: str = "", pin_memory: bool = False, **rest: Any
) -> Any:
    return make(*args, **rest)
