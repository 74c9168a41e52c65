"""The few calls of CUDA's driver that torch has no names for, with errors as ours.

Source: CUDA 13 driver API, "Virtual Memory Management" and "Stream Memory Operations".
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor

from sglang_afd.errors import AfdError

_GRANULARITY = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
_CARVEOUT = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_DESCRIPTOR = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class CudaError(AfdError):
    """CUDA refused a call."""


def check(result: tuple[Any, ...]) -> Any:
    """What a call of the bindings returned, without its status.

    Raises:
        CudaError: The status is not success.
    """
    status, *values = result
    if status.value != 0:
        raise CudaError(f"CUDA said {status.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """Calls of the driver go to `device`, in any thread, also while another thread captures."""
    check(driver.cuCtxPushCurrent(_context(device)))
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(before))
        check(driver.cuCtxPopCurrent())


@functools.cache
def _context(device: int) -> Any:
    # The one that torch uses, too; held, since it would go with its last user.
    torch.cuda.init()
    return check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(device))))


class Module:
    """Kernels of one source file, compiled for `device` and loaded at once.

    NOTE: a kernel that is loaded at its first launch would wait for one that spins.
    """

    def __init__(self, source: str, name: str, device: int, definitions: dict[str, int]) -> None:
        self._device = device
        with on_device(device):
            self._module = check(driver.cuModuleLoadData(_compile(source, name, definitions)))
        self._functions: dict[str, Any] = {}

    def function(self, name: str) -> Any:
        """One kernel."""
        if name not in self._functions:
            function = check(driver.cuModuleGetFunction(self._module, name.encode()))
            # A block that waits would keep its SM from changing over to more shared memory, which
            # attention and expert kernels need.
            check(driver.cuFuncSetAttribute(function, _CARVEOUT, 100))
            self._functions[name] = function
        return self._functions[name]


def launch(
    function: Any,
    stream: int,
    grid: int,
    block: int,
    arguments: tuple[tuple[Any, ...], tuple[Any, ...]],
) -> None:
    """Enqueue a kernel; `arguments` are its values and their ctypes."""
    check(driver.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, arguments, 0))


class SharedMemory:
    """Device memory that other processes can map, or such memory of another process.

    Args:
        num_bytes: Wanted; the allocation is rounded up.
        device: Where it lies, or from where it is reached.
        descriptor: Of another process's memory; None allocates.
    """

    def __init__(self, num_bytes: int, device: int, descriptor: int | None = None) -> None:
        self._device = device
        with on_device(device):
            place = driver.CUmemAllocationProp()
            place.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            place.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            place.location.id = device
            place.requestedHandleTypes = _DESCRIPTOR
            step = check(driver.cuMemGetAllocationGranularity(place, _GRANULARITY))
            self.num_bytes = -(-num_bytes // step) * step
            if descriptor is None:
                self._handle = check(driver.cuMemCreate(self.num_bytes, place, 0))
            else:
                self._handle = check(driver.cuMemImportFromShareableHandle(descriptor, _DESCRIPTOR))
            self.address = int(check(driver.cuMemAddressReserve(self.num_bytes, 0, 0, 0)))
            check(driver.cuMemMap(self.address, self.num_bytes, 0, self._handle, 0))
            access = driver.CUmemAccessDesc()
            access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = device
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            check(driver.cuMemSetAccess(self.address, self.num_bytes, [access], 1))

    def export(self) -> int:
        """A file descriptor that names this memory; the caller closes it."""
        with on_device(self._device):
            return int(check(driver.cuMemExportToShareableHandle(self._handle, _DESCRIPTOR, 0)))

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on this memory, which must outlive it."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        if offset + num_bytes > self.num_bytes:
            raise AssertionError(f"{offset} + {num_bytes} bytes of {self.num_bytes}")
        raw = torch.as_tensor(
            _CudaArray(self.address + offset, num_bytes), device=f"cuda:{self._device}"
        )
        return raw.view(dtype).view(shape)

    def close(self) -> None:
        """Unmap it; the memory lives on while another process has it mapped. Idempotent."""
        if not self.address:
            return
        with on_device(self._device):
            check(driver.cuMemUnmap(self.address, self.num_bytes))
            check(driver.cuMemAddressFree(self.address, self.num_bytes))
            check(driver.cuMemRelease(self._handle))
        self.address = 0


class SharedPage:
    """Host memory that kernels of this process write and another process reads.

    Args:
        num_bytes: Of the page.
        device: Whose kernels write.
    """

    def __init__(self, num_bytes: int, device: int) -> None:
        self.descriptor = os.memfd_create("sglang-afd-doorbell", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, num_bytes)
        page = mmap.mmap(self.descriptor, num_bytes)
        held = ctypes.c_char.from_buffer(page)
        host = ctypes.addressof(held)
        with on_device(device):
            check(driver.cuMemHostRegister(host, num_bytes, driver.CU_MEMHOSTREGISTER_DEVICEMAP))
            self.address = int(check(driver.cuMemHostGetDevicePointer(host, 0)))
        self._free = weakref.finalize(self, _free_page, self.descriptor, device, page, held)

    def close(self) -> None:
        """Free it, once no kernel writes to it; idempotent."""
        self._free()


def _free_page(descriptor: int, device: int, page: mmap.mmap, held: ctypes.c_char) -> None:
    with on_device(device):
        check(driver.cuMemHostUnregister(ctypes.addressof(held)))
    os.close(descriptor)  # the page itself goes with its last user


def current_stream(device: int) -> int:
    """torch's current stream, without the objects that torch makes around its number."""
    return torch._C._cuda_getCurrentRawStream(device)


def synchronize(stream: int) -> None:
    """Wait for a stream; allowed while another one is captured."""
    check(driver.cuStreamSynchronize(stream))


def wait_value(stream: int, address: int, value: int) -> None:
    """The stream goes on once the 32-bit word at `address` is `value`; capturable."""
    equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
    check(driver.cuStreamWaitValue32(stream, address, value, equal))


def set_words(stream: int, address: int, value: int, number: int = 1) -> None:
    """Store 32-bit words in device memory, in stream order."""
    check(driver.cuMemsetD32Async(address, value, number, stream))


class _CudaArray:
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def _compile(source: str, name: str, definitions: dict[str, int]) -> bytes:
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    options += [f"-D{key}={value}".encode() for key, value in definitions.items()]
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status.value != 0:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise CudaError(f"{name} does not compile: {log.decode()}")
    cubin: bytes = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin
