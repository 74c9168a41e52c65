"""Lets a process import SGLang and read its arguments without initialising CUDA.

A process in which CUDA was initialised cannot fork children that use it. SGLang asks for the
device's properties at import and when it reads arguments, which initialises CUDA. Here a child asks
once for all; its answers are given until the process itself initialises CUDA.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked

_initialised_at: list[str] = []


def use_nvml() -> None:
    """Have torch look for devices through NVML; before torch is imported."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def keep() -> None:
    """Put the answers in place; before SGLang is imported.

    Raises:
        RuntimeError: A process that uses CUDA could not be forked from here.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("NVML shows no GPU")
    answers = forked.ask_in_a_child(_properties)
    properties = SimpleNamespace(**answers["properties"])
    _answer("get_device_properties", lambda device=None: properties)
    _answer("current_device", lambda: 0)
    _answer("mem_get_info", lambda device=None: tuple(answers["memory"]))
    # torch.get_device_module() would count devices with CUDA, whatever else is answered here.
    torch._C._get_accelerator = lambda: torch.device("cuda")
    _note_initialisation()
    os.register_at_fork(before=_warn)
    check()


def check() -> None:
    """Raise if CUDA, or its driver, was initialised in this process."""
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError(f"CUDA was initialised before a fork:\n{''.join(_initialised_at)}")
    if forked.is_cuda_initialised():
        raise RuntimeError("CUDA's driver was initialised before a fork, by whatever it was")


def main(argv: Sequence[str]) -> int:
    """In a forked process: use the GPU, and write down what it said."""
    import torch

    total = int(torch.arange(5, device="cuda").sum())
    Path(argv[0]).write_text(json.dumps({"sum": total, **_properties()}))
    return 0


def _properties() -> dict[str, Any]:
    import torch

    return {"properties": forked.device_properties(), "memory": torch.cuda.mem_get_info()}


def _answer(name: str, answer: Callable[..., Any]) -> None:
    import torch

    real = getattr(torch.cuda, name)

    def ask(*args: Any, **kwargs: Any) -> Any:
        is_unborn = not torch.cuda.is_initialized()
        return answer(*args, **kwargs) if is_unborn else real(*args, **kwargs)

    setattr(torch.cuda, name, ask)


def _note_initialisation() -> None:
    import torch

    initialise = torch.cuda._lazy_init

    def note_and_initialise() -> None:
        if not torch.cuda.is_initialized():
            _initialised_at[:] = traceback.format_stack()
        initialise()

    torch.cuda._lazy_init = note_and_initialise


def _warn() -> None:
    try:
        check()
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
