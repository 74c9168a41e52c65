"""Import SGLang for a GPU without initialising CUDA, so that children can be forked afterwards.

SGLang and its kernels ask PyTorch for the device while they are imported, and PyTorch initialises
CUDA to answer; a forked child could then not use the GPU. So a child is asked first, and while
`asked_elsewhere` is in force its answers are given. No longer: children that load a model must hear
how much memory is free at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import forked
import torch

_QUESTIONS = ("is_available", "device_count", "get_device_capability", "get_device_name")


@contextmanager
def asked_elsewhere() -> Iterator[None]:
    """In here the questions of an import are answered without CUDA.

    Raises:
        RuntimeError: A forked child cannot use the GPU.
    """
    answers = forked.ask_in_a_child(_answers)
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


def _answering(
    original: Callable[..., Any], answer: Any, is_importing: list[bool]
) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        # NOTE: Triton keeps these functions for good when its driver is first asked for.
        return answer if is_importing[0] else original(*args, **kwargs)

    return ask


def _answers() -> dict[str, Any]:
    return {name: getattr(torch.cuda, name)() for name in _QUESTIONS} | {
        "current_device": 0,
        "mem_get_info": torch.cuda.mem_get_info(),
        "get_device_properties": forked.device_properties(),
    }
