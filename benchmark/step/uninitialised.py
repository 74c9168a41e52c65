"""Import SGLang for a GPU without initialising CUDA, so that children can be forked afterwards.

SGLang and its kernels ask PyTorch for the device while they are imported, and PyTorch initialises
CUDA to answer; a forked child could then not use the GPU. So a child is asked first, and while
`asked_elsewhere` is in force its answers are given.
"""

from __future__ import annotations

import ctypes
import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

_CUDA_ERROR_NOT_INITIALIZED = 3
_QUESTIONS = ("is_available", "device_count", "get_device_capability", "get_device_name")
_PLAIN = (bool, int, float, str)


@contextmanager
def asked_elsewhere() -> Iterator[None]:
    """In here the questions of an import are answered without CUDA.

    Raises:
        RuntimeError: A forked child cannot use the GPU.
    """
    answers = _ask_in_a_child()
    answers["get_device_properties"] = SimpleNamespace(**answers["get_device_properties"])
    answers = {name: tuple(a) if isinstance(a, list) else a for name, a in answers.items()}
    originals = {name: getattr(torch.cuda, name) for name in answers}
    is_importing = [True]
    for name, answer in answers.items():
        setattr(torch.cuda, name, _answering(originals[name], answer, is_importing))
    accelerator = torch._C._get_accelerator  # behind torch.get_device_module(); it counts devices
    torch._C._get_accelerator = _answering(accelerator, torch.device("cuda"), is_importing)
    try:
        yield
    finally:
        is_importing[0] = False
        for name, original in originals.items():
            setattr(torch.cuda, name, original)
        torch._C._get_accelerator = accelerator


def is_initialised() -> bool:
    """Has this process initialised CUDA, in whatever way?"""
    if torch.cuda.is_initialized():
        return True
    count = ctypes.c_int()
    code = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))
    return bool(code != _CUDA_ERROR_NOT_INITIALIZED)


def _answering(
    original: Callable[..., Any], answer: Any, is_importing: list[bool]
) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        # NOTE: Triton keeps these functions for good when its driver is first asked for.
        return answer if is_importing[0] else original(*args, **kwargs)

    return ask


def _ask_in_a_child() -> dict[str, Any]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(writer, json.dumps(_answers()).encode())
            code = 0
        except BaseException:  # noqa: BLE001 - the process ends here; its output shall say why
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError("a forked process cannot use CUDA; its traceback is above")
    return dict(json.loads(text))


def _answers() -> dict[str, Any]:
    found = torch.cuda.get_device_properties(0)
    fields = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    properties = {name: value for name, value in fields.items() if isinstance(value, _PLAIN)}
    return {name: getattr(torch.cuda, name)() for name in _QUESTIONS} | {
        "current_device": 0,
        "mem_get_info": torch.cuda.mem_get_info(),
        "get_device_properties": properties | {"uuid": str(fields.get("uuid", ""))},
    }
