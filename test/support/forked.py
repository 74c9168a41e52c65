"""What programs need that import SGLang once and fork the processes which use it.

With a GPU the import must not initialise CUDA, or no forked process could use it. SGLang and its
kernels ask for the device while they are imported; so a child is asked before, and its answers are
given. Used by the tests' own zygote, and by benchmarks.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_PLAIN = (bool, int, float, str)


def ask_in_a_child(question: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What `question` returns in a forked process, as JSON carries it; here it leaves no trace.

    Raises:
        RuntimeError: It raised. With CUDA that means that no process forked from here can use it.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        end_with(lambda: _write(writer, question()))
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError("a forked process could not answer; its traceback is above")
    return dict(json.loads(text))


def device_properties() -> dict[str, Any]:
    """Of the first GPU, as far as JSON can carry them; initialises CUDA."""
    import torch

    found = torch.cuda.get_device_properties(0)
    fields = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    plain = {name: value for name, value in fields.items() if isinstance(value, _PLAIN)}
    return plain | {"uuid": str(fields.get("uuid", ""))}


def is_cuda_initialised() -> bool:
    """Has this process initialised CUDA, by torch or by its driver?"""
    import torch

    if torch.cuda.is_initialized():
        return True
    count = ctypes.c_int()
    code = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))
    return bool(code != _NOT_INITIALIZED)


def detach(log: str) -> None:
    """Give this process a session of its own, no input, and a file to print into."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)


def end_with(run: Callable[[], int]) -> NoReturn:
    """Run, and end this forked process with what that returns, whatever happens."""
    code = 1
    try:
        code = run()
    except SystemExit as exit_request:
        code = exit_request.code if isinstance(exit_request.code, int) else 1
    except BaseException:  # noqa: BLE001 - the process ends here; its output shall say why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _write(writer: int, answer: Mapping[str, Any]) -> int:
    os.write(writer, json.dumps(answer).encode())
    return 0
