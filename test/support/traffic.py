"""Rows to send over a link."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_afd.protocol.messages import Dispatch, Kind, ModelSpec
from sglang_afd.transport.base import Link, Rows

SEED = 20_240_607


def random_rows(spec: ModelSpec, num_rows: int, generator: torch.Generator) -> Rows:
    """Rows for any expert, or none."""
    shape = (num_rows, spec.top_k)
    return Rows(
        hidden_states=torch.randn(num_rows, spec.hidden_size, generator=generator).to(
            getattr(torch, spec.dtype)
        ),
        topk_ids=torch.randint(-1, spec.num_experts, shape, dtype=torch.int32, generator=generator),
        topk_weights=torch.rand(shape, generator=generator),
    )


def rows_to(spec: ModelSpec, expert: int, num_rows: int = 2) -> Rows:
    """Rows of ones that all go to one expert."""
    return Rows(
        hidden_states=torch.ones(num_rows, spec.hidden_size),
        topk_ids=torch.full((num_rows, spec.top_k), expert, dtype=torch.int32),
        topk_weights=torch.ones(num_rows, spec.top_k),
    )


def dispatch(link: Link, rows: Rows, **changes: Any) -> None:
    """Send rows under a header of which some fields may be changed."""
    place = {
        "epoch": link.epoch,
        "step": 1,
        "layer_id": 1,
        "micro_batch_id": 0,
        "num_micro_batches": 4,
        "kind": Kind.DECODE,
    }
    num_rows = rows.hidden_states.shape[0]
    link.dispatch(Dispatch(**place | changes, num_rows=num_rows), rows)


def exchange(link: Link, rows: Rows, **changes: Any) -> Tensor:
    """Send rows and wait for their sum."""
    dispatch(link, rows, **changes)
    return link.combine(changes.get("micro_batch_id", 0))
