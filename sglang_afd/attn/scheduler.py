"""The hooks in SGLang's scheduler process, and what happens when the MLP servers are gone."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from sglang_afd.attn import runtime
from sglang_afd.attn.remote_moe import RemoteFusedMoE
from sglang_afd.attn.runtime import Runtime
from sglang_afd.attn.status import StatusBoard
from sglang_afd.config import AfdConfig
from sglang_afd.errors import AfdError, PeerLost
from sglang_afd.protocol.messages import Kind
from sglang_afd.upstream import hooks, scheduler, weights
from sglang_afd.upstream.moe import MOE_CLASS_HOOK
from sglang_afd.upstream.server_args import ServerArgs

logger = logging.getLogger(__name__)


def run_attn_scheduler(
    config: AfdConfig, board: StatusBoard, server_args: ServerArgs, *args: Any, **kwargs: Any
) -> None:
    """Entry point of the scheduler process: hooks first, then SGLang's own entry point.

    Args:
        config: Ours.
        board: Shown by the HTTP process.
        server_args: SGLang's.
        *args: Whatever else SGLang passes.
        **kwargs: Whatever else SGLang passes.
    """
    runtime.install(Runtime(config, server_args, board))
    try:
        hooks.install(build_hooks())
    except AfdError as error:
        _die(error)
    scheduler.run_scheduler_process(server_args, *args, **kwargs)


def build_hooks() -> list[hooks.Hook]:
    """Every hook of the attention role; docs/upstream.md explains each."""
    read = weights.without_experts(runtime.current().read_count)
    return [
        hooks.Hook(
            target=MOE_CLASS_HOOK, type=hooks.REPLACE, function=lambda quant_config: RemoteFusedMoE
        ),
        *(
            hooks.Hook(target=target, type=hooks.REPLACE, function=read)
            for target in weights.ITERATOR_HOOKS
        ),
        hooks.Hook(
            target=scheduler.LOAD_MODEL_HOOK, type=hooks.AROUND, function=_around_load_model
        ),
        hooks.Hook(
            target=scheduler.EVENT_LOOP_HOOK, type=hooks.AROUND, function=_around_event_loop
        ),
        hooks.Hook(target=scheduler.RUN_BATCH_HOOK, type=hooks.AROUND, function=_around_run_batch),
    ]


def _around_load_model(
    load_model: Callable[..., None], runner: scheduler.ModelRunner, *args: Any, **kwargs: Any
) -> None:
    load_model(runner, *args, **kwargs)
    try:
        runtime.current().adopt_model(
            runner.model,
            architecture=runner.model_config.hf_config.architectures[0],
            dtype=str(runner.model_config.dtype).removeprefix("torch."),
        )
    except AfdError as error:
        _die(error)


def _around_event_loop(
    dispatch_event_loop: Callable[[scheduler.Scheduler], None], owner: scheduler.Scheduler
) -> None:
    """SGLang's event loop, entered again whenever the MLP servers were lost in it."""
    here = runtime.current()
    try:
        here.wait_attached()
    except AfdError as error:
        _die(error)
    while True:
        try:
            dispatch_event_loop(owner)
            return
        except PeerLost as error:
            on_peer_lost(owner, error)


def on_peer_lost(owner: scheduler.Scheduler, error: PeerLost) -> None:
    """The one place that decides what losing the MLP servers means: every request fails."""
    board = runtime.current().board
    message = f"the MLP servers are away ({error}); try again shortly"
    num_failed = scheduler.fail_all_requests(owner, message)
    board.update(num_failed_requests=board.read().num_failed_requests + num_failed)
    logger.warning("failed %d request(s): %s", num_failed, error)


def _around_run_batch(
    run_batch: Callable[..., Any],
    owner: scheduler.Scheduler,
    batch: scheduler.ScheduleBatch,
    *args: Any,
    **kwargs: Any,
) -> Any:
    kind = Kind.DECODE if batch.forward_mode.is_decode() else Kind.PREFILL
    with runtime.current().step(owner.forward_ct + 1, kind):
        return run_batch(owner, batch, *args, **kwargs)


def _die(error: AfdError) -> NoReturn:
    """End the whole server with one line; the signal tells SGLang's parent that a child failed."""
    sys.stderr.write(f"sglang-afd: error: {error}\n")
    sys.stderr.flush()
    os.kill(os.getppid(), signal.SIGQUIT)
    os._exit(1)
