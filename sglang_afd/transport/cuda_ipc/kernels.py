"""The kernels of `exchange.cu`, compiled once for a device and a dtype."""

from __future__ import annotations

import ctypes
import functools
from importlib import resources
from typing import Any

import torch

from sglang_afd.transport.cuda_ipc import driver, layout

VECTOR_BYTES = 16
WARP = 32
MAX_BLOCK = 256
_FP8_CAPABILITY = (8, 9)  # the first with instructions for e4m3

POINTER, U32, U64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64


@functools.cache
def module(device: int, dtype: str) -> driver.Module:
    """Every kernel for rows of `dtype`, a key of ITEMSIZES."""
    torch.cuda.set_device(device)
    torch.cuda.current_stream().synchronize()  # makes the context
    source = resources.files("sglang_afd.transport.cuda_ipc").joinpath("exchange.cu").read_text()
    capability = torch.cuda.get_device_capability(device)
    made = driver.Module(source, "exchange.cu", device, definitions(dtype, capability))
    for name in ("stage_step", "dispatch", "wait", "sum", "set_link", "plan", "pull", "push"):
        made.function(f"afd_{name}")
    return made


def definitions(dtype: str, capability: tuple[int, int]) -> dict[str, int]:
    """What `exchange.cu` is compiled with, for rows of `dtype` on a GPU of `capability`."""
    dtypes = {f"DTYPE_{name.upper()}": int(name == dtype) for name in layout.ITEMSIZES}
    return dtypes | {
        "WITH_FP8": int(capability >= _FP8_CAPABILITY),
        "CONTROL_WORDS": layout.PAGE_BYTES // 4,
        "DOORBELL_LINE_WORDS": layout.DOORBELL_LINE_BYTES // 4,
        "LINK": layout.LINK,
        "NUM_RANKS": layout.NUM_RANKS,
        "EPOCH": layout.EPOCH,
        "STEP_WORDS": layout.STEP_WORDS,
        "HEADER": layout.HEADER,
        "ROWS_WANTED": layout.ROWS_WANTED,
        "ROWS_HERE": layout.ROWS_HERE,
        "ROWS_BEFORE": layout.ROWS_BEFORE,
        "NUM_REPLIED": layout.NUM_REPLIED,
        "NUM_WANTED": layout.NUM_WANTED,
        "ALL_REPLIED": layout.ALL_REPLIED,
        "NUM_RINGS": layout.NUM_RINGS,
    }


def arguments(*pairs: tuple[Any, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(value, ctype) pairs as `driver.launch` takes them."""
    return tuple(value for value, _ in pairs), tuple(kind for _, kind in pairs)


def block_of(vectors_per_row: int) -> int:
    """Threads that copy one row."""
    return min(MAX_BLOCK, -(-vectors_per_row // WARP) * WARP)


def has_fp8(device: int) -> bool:
    """Can this GPU quantise rows to e4m3?"""
    return torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
