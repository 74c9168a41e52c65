"""What SGLang and torch keep in globals while a forward runs, as values to swap and to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.dp_attention import get_local_dp_buffer_len, set_local_dp_buffer_len
from sglang.srt.model_executor.forward_context import (
    ForwardContext,
    get_forward_context,
    has_forward_context,
    set_forward_context,
)
from sglang.srt.runtime_context import get_forward

__all__ = ["ForwardContext", "ForwardState", "ThreadState", "capture", "restore"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardState:
    """Plain globals of SGLang, which a context variable does not carry along."""

    context: ForwardContext | None  # names the attention backend
    flags: Mapping[str, Any]
    local_dp_buffer_len: int


def capture() -> ForwardState:
    """What is in force now."""
    return ForwardState(
        context=get_forward_context() if has_forward_context() else None,
        flags=dict(get_forward()._plain),
        local_dp_buffer_len=get_local_dp_buffer_len(),
    )


def restore(state: ForwardState) -> None:
    """Put `state` in force."""
    set_forward_context(state.context)
    get_forward()._plain.update(state.flags)
    set_local_dp_buffer_len(state.local_dp_buffer_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadState:
    """What torch keeps for the thread, so that all micro-batches share it."""

    is_grad_enabled: bool
    is_inference: bool
    dtype: torch.dtype  # of new tensors
    stream: torch.cuda.Stream | None  # None without a GPU

    @classmethod
    def now(cls) -> ThreadState:
        """Of the calling thread."""
        has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            is_grad_enabled=torch.is_grad_enabled(),
            is_inference=torch.is_inference_mode_enabled(),
            dtype=torch.get_default_dtype(),
            stream=torch.cuda.current_stream() if has_gpu else None,
        )
