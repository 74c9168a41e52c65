"""Tensors to raw frames and back: one frame for the rows of a dispatch, one for a partial sum."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_afd.errors import ProtocolError
from sglang_afd.transport.base import Rows

_Bytes = npt.NDArray[np.uint8]


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
    expected = shape[0] * shape[1] * dtype.itemsize
    if len(frame) != expected:
        raise ProtocolError(
            f"{name} came as {len(frame)} bytes; {shape[0]} rows of {shape[1]} {dtype} "
            f"are {expected}"
        )
    return _tensor(np.frombuffer(frame, dtype=np.uint8).copy(), shape, dtype)


def pack_rows(rows: Rows) -> memoryview:
    """Ids, weights and hidden states in one frame; what takes four bytes comes first."""
    parts = [
        np.frombuffer(to_frame(tensor), dtype=np.uint8)
        for tensor in (rows.topk_ids, rows.topk_weights, rows.hidden_states)
    ]
    return np.concatenate(parts).data


def unpack_rows(
    frame: bytes | memoryview, num_rows: int, hidden_size: int, top_k: int, dtype: torch.dtype
) -> Rows:
    """Copy a frame of `pack_rows` into new tensors.

    Raises:
        ProtocolError: The frame's size is not that of so many rows.
    """
    ids_bytes = num_rows * top_k * 4
    expected = 2 * ids_bytes + num_rows * hidden_size * dtype.itemsize
    if len(frame) != expected:
        raise ProtocolError(
            f"rows came as {len(frame)} bytes; {num_rows} rows of {hidden_size} {dtype} and "
            f"{top_k} choices are {expected}"
        )
    owned = np.frombuffer(frame, dtype=np.uint8).copy()
    return Rows(
        topk_ids=_tensor(owned[:ids_bytes], (num_rows, top_k), torch.int32),
        topk_weights=_tensor(owned[ids_bytes : 2 * ids_bytes], (num_rows, top_k), torch.float32),
        hidden_states=_tensor(owned[2 * ids_bytes :], (num_rows, hidden_size), dtype),
    )


def _tensor(owned: _Bytes, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    if not owned.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(owned).view(dtype).view(shape)
