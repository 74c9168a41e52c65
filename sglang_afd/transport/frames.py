"""Tensors to raw frames and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_afd.errors import ProtocolError


def to_frame(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy; the tensor must outlive the send."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data


def from_frame(
    frame: bytes | memoryview, shape: tuple[int, int], dtype: torch.dtype, name: str
) -> Tensor:
    """Copy a frame into a new tensor (frames are neither aligned nor ours to keep).

    Raises:
        ProtocolError: The frame's size is not that of `shape`.
    """
    tensor = torch.empty(shape, dtype=dtype)
    expected = tensor.numel() * tensor.element_size()
    if len(frame) != expected:
        raise ProtocolError(
            f"{name} came as {len(frame)} bytes; {shape[0]} rows of {shape[1]} {dtype} "
            f"are {expected}"
        )
    if expected:
        tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(frame, dtype=np.uint8)
    return tensor
