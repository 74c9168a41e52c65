from __future__ import annotations

import pytest
import torch

from sglang_afd.errors import ProtocolError
from sglang_afd.transport.frames import from_frame, to_frame

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (0, 4)])
def test_a_tensor_comes_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape).mul(100).to(dtype)

    back = from_frame(bytes(to_frame(tensor)), shape, dtype, "rows")

    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_a_slice_of_columns_is_sent_row_by_row() -> None:
    tensor = torch.arange(12.0).view(3, 4)[:, 1:3]

    assert torch.equal(from_frame(to_frame(tensor), (3, 2), torch.float32, "rows"), tensor)


def test_a_received_tensor_owns_its_memory() -> None:
    frame = bytearray(to_frame(torch.ones(1, 2)))

    tensor = from_frame(memoryview(frame), (1, 2), torch.float32, "rows")
    frame[:] = bytes(len(frame))

    assert torch.equal(tensor, torch.ones(1, 2))


def test_an_unaligned_frame_is_read() -> None:
    frame = b"x" + bytes(to_frame(torch.arange(3.0)))

    tensor = from_frame(memoryview(frame)[1:], (1, 3), torch.float32, "rows")

    assert tensor.tolist() == [[0.0, 1.0, 2.0]]


@pytest.mark.parametrize("num_bytes", [0, 15, 17, 32])
def test_a_frame_of_another_size_is_refused_with_both_sizes(num_bytes: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        from_frame(bytes(num_bytes), (2, 2), torch.float32, "topk_weights")

    assert str(caught.value) == (
        f"topk_weights came as {num_bytes} bytes; 2 rows of 2 torch.float32 are 16"
    )
