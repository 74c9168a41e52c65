"""What this process holds on its GPU, from its real tensors and torch's allocator."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor


def memory_of_attention(runner: ModelRunner, slab_bytes: int) -> dict[str, int]:
    """Of a scheduler process, once its graphs are captured; empty on a CPU."""
    if not torch.cuda.is_initialized():
        return {}
    sizes = runner.token_to_kv_pool.get_kv_size_bytes()  # of keys and of values; one with MLA
    kv_bytes = int(sum(sizes)) if isinstance(sizes, tuple) else int(sizes)
    return memory_of(
        runner.model.parameters(),
        kv_bytes=kv_bytes + tensor_bytes([runner.req_to_token_pool.req_to_token]),
        slab_bytes=slab_bytes,
    )


def memory_of(
    weights: Iterable[Tensor], *, kv_bytes: int = 0, slab_bytes: int = 0
) -> dict[str, int]:
    """Bytes by what they are for; without the CUDA context, which torch does not see.

    Args:
        weights: Every tensor of the model; shared storage counts once.
        kv_bytes: The caches, within torch's allocator.
        slab_bytes: Slots, which lie outside of it.

    Returns: Empty where this process uses no GPU. `pid` is the process that it is about.
    """
    if not torch.cuda.is_initialized():
        return {}
    reserved, graphs = torch.cuda.memory_reserved(), graph_bytes()
    weights_bytes = tensor_bytes(weights)
    return {
        "pid": os.getpid(),
        "weights_bytes": weights_bytes,
        "kv_bytes": kv_bytes,
        "graphs_bytes": graphs,
        "slab_bytes": slab_bytes,
        "other_bytes": max(0, reserved - weights_bytes - kv_bytes - graphs),
        "total_bytes": reserved + slab_bytes,
    }


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Storage of tensors on a GPU; what two of them share counts once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.is_cuda
    }
    return sum(storages.values())


def graph_bytes() -> int:
    """Segments of private pools, which is where torch's graphs keep what they work on."""
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["segment_pool_id"] != (0, 0)
    )
