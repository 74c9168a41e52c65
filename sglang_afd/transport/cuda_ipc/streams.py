"""Streams that nobody else uses, and that go past kernels which wait."""

from __future__ import annotations

import torch
from cuda.bindings import driver as cuda

from sglang_afd.transport.cuda_ipc.driver import check, on_device


def own_stream(device: int, *, is_urgent: bool = False) -> torch.cuda.Stream:
    """A new stream, for as long as this process runs.

    torch hands out each of its 32 streams again and again, so that work which ends a wait could
    stand behind the wait.

    Args:
        device: CUDA's index of the GPU.
        is_urgent: For work that ends waits of others. Streams of one priority share the few queues
            of a GPU (CUDA_DEVICE_MAX_CONNECTIONS), and a kernel that waits keeps its queue shut.
    """
    with on_device(device):
        _, greatest = check(cuda.cuCtxGetStreamPriorityRange())
        flags = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        stream = check(cuda.cuStreamCreateWithPriority(flags, greatest if is_urgent else 0))
    return torch.cuda.ExternalStream(int(stream), device=torch.device("cuda", device))
