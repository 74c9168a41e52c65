"""Chooses how rows travel, once the model is loaded, and builds the attacher that goes with it."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from sglang_afd.attn.attach import Attacher
from sglang_afd.attn.device_exchange import DeviceExchange
from sglang_afd.attn.exchange import StepExchange
from sglang_afd.attn.host_exchange import HostExchange
from sglang_afd.attn.stall_guard import StallGuard
from sglang_afd.attn.status import StatusBoard
from sglang_afd.config import AUTO_GRAPH_SLOTS, AfdConfig, Transport
from sglang_afd.errors import ConfigError
from sglang_afd.protocol.messages import MAX_MICRO_BATCHES
from sglang_afd.trace.attn import AttnTimeline
from sglang_afd.transport.cuda_ipc.layout import shape_of
from sglang_afd.transport.cuda_ipc.policy import choose_wait_policy
from sglang_afd.transport.zmq_link import LinkOptions, ZmqLink

logger = logging.getLogger(__name__)


def open_exchange(
    config: AfdConfig,
    options: LinkOptions,
    board: StatusBoard,
    *,
    device_index: int,
    step_limit_s: float,
    timeline: AttnTimeline | None,
) -> tuple[Attacher[Any], StepExchange]:
    """The attacher, and what sends rows over its links.

    Args:
        config: Its transport is no longer "auto".
        options: Of each link.
        board: Shown by the HTTP process.
        device_index: Of the GPU on which the slots are to be.
        step_limit_s: What a step may take with all its waits.
        timeline: Of exchanges through host memory.

    Raises:
        ConfigError: Rows of this model cannot travel as asked.
    """
    if config.transport == Transport.CUDA_IPC:
        return _on_device(config, options, board, device_index, step_limit_s)
    attacher = Attacher(config.mlp_url, options, board, connect=ZmqLink)
    attacher.start()
    return attacher, HostExchange(attacher, config.max_rows, timeline)


def _on_device(
    config: AfdConfig,
    options: LinkOptions,
    board: StatusBoard,
    device_index: int,
    step_limit_s: float,
) -> tuple[Attacher[Any], StepExchange]:
    # NOTE: these need CUDA's Python bindings, which a machine without a GPU may lack.
    from sglang_afd.transport.cuda_ipc.link import CudaIpcLink
    from sglang_afd.transport.cuda_ipc.slab import Slab

    spec = options.spec
    try:
        shape = shape_of(spec, num_slots=num_slots(config), max_ranks=config.max_mlp_ranks)
    except ValueError as error:
        raise ConfigError(
            f"rows of this model cannot stay on the GPU: {error}; start both roles with "
            f"--afd-transport zmq"
        ) from None
    policy = choose_wait_policy(config.wait_policy)
    slab = Slab(shape, device_index, policy)
    logger.info(
        "slots for %d micro-batch(es) and the replies of up to %d MLP rank(s) take %.1f MiB; "
        "waits: %s",
        shape.num_slots,
        shape.max_ranks,
        shape.num_bytes / (1 << 20),
        policy.value,
    )
    guard = StallGuard(
        slab,
        functools.partial(CudaIpcLink, slab=slab),
        stall_timeout_s=config.stall_timeout_s,
        step_limit_s=step_limit_s,
        synchronize=functools.partial(torch.cuda.synchronize, device_index),
    )
    attacher = Attacher(config.mlp_url, options, board, connect=guard.connect)
    return attacher, DeviceExchange(
        attacher,
        guard,
        slab,
        max_rows=config.max_rows,
        slab_bytes=shape.num_bytes,
    )


def num_slots(config: AfdConfig) -> int:
    """Micro-batches that a step may have at once."""
    setting = config.num_micro_batches
    return AUTO_GRAPH_SLOTS if setting == "auto" else min(int(setting), MAX_MICRO_BATCHES)
