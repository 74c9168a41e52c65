"""When a stream passed a place, by the GPU's own clock, which its processes share."""

from __future__ import annotations

import functools

import torch

from sglang_afd.transport.cuda_ipc import driver
from sglang_afd.transport.cuda_ipc.kernels import POINTER, arguments

_SOURCE = """
extern "C" __global__ void stamp(unsigned long long* out) {
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(*out));
}
"""


@functools.cache
def _kernel(device: int) -> object:
    return driver.Module(_SOURCE, "stamp.cu", device, {}).function("stamp")


class Stamps:
    """One time for each layer, in nanoseconds."""

    def __init__(self, num_layers: int) -> None:
        self._times = torch.zeros(num_layers, dtype=torch.int64, device="cuda")
        self._kernel = _kernel(torch.cuda.current_device())

    def put(self, layer: int) -> None:
        """Note the time when torch's current stream gets here; capturable."""
        place = self._times.data_ptr() + 8 * layer
        stream = torch.cuda.current_stream().cuda_stream
        driver.launch(self._kernel, stream, 1, 1, arguments((place, POINTER)))

    def read(self) -> list[int]:
        """All of them, once the stream is done."""
        return [int(time) for time in self._times.tolist()]
