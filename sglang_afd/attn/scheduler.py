"""The hooks in SGLang's scheduler process."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from sglang_afd.attn import model_hooks, runtime
from sglang_afd.attn.announcer import Forecast
from sglang_afd.attn.load import SchedulerLoad
from sglang_afd.attn.recovery import Recovery
from sglang_afd.attn.runtime import Runtime
from sglang_afd.attn.status import StatusBoard
from sglang_afd.config import AfdConfig
from sglang_afd.errors import AfdError, PeerLost, StallTimeout
from sglang_afd.protocol.messages import Kind
from sglang_afd.upstream import gpu_memory, hooks, load, scheduler
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
    try:
        runtime.install(Runtime(config, server_args, board))
        hooks.install(build_hooks())
    except AfdError as error:
        _die(error)
    scheduler.run_scheduler_process(server_args, *args, **kwargs)


def build_hooks() -> list[hooks.Hook]:
    """Every hook of the attention role; docs/upstream.md explains each."""
    own: dict[str, Callable[..., Any]] = {
        scheduler.EVENT_LOOP_HOOK: _around_event_loop,
        scheduler.RUN_BATCH_HOOK: _around_run_batch,
        scheduler.PROCESS_RESULT_HOOK: _around_process_result,
        scheduler.IDLE_HOOK: _around_idle,
    }
    return [
        *model_hooks.build_hooks(_die),
        *(
            hooks.Hook(target=target, type=hooks.AROUND, function=function)
            for target, function in own.items()
        ),
    ]


def _around_event_loop(
    dispatch_event_loop: Callable[[scheduler.Scheduler], None], owner: scheduler.Scheduler
) -> None:
    """SGLang's event loop, entered again whenever a step could not be finished in it."""
    here = runtime.current()
    here.board.update(
        memory=gpu_memory.memory_of_attention(
            owner.tp_worker.model_runner, slab_bytes=here.exchange.slab_bytes
        ),
        max_running_requests=owner.max_running_requests,
        kv_tokens=owner.max_total_num_tokens,
    )
    _show_load(owner, None)
    try:
        here.wait_attached()
    except AfdError as error:
        _die(error)
    recovery = Recovery(here)
    while True:
        try:
            dispatch_event_loop(owner)
            here.close()
            return
        except StallTimeout as error:
            here.exchange.give_up(str(error))
            recovery.after_stall(owner, error)
        except PeerLost as error:
            here.exchange.give_up(str(error))
            recovery.after_failure(owner, error)
        _show_load(owner, None)


def _around_run_batch(
    run_batch: Callable[..., Any],
    owner: scheduler.Scheduler,
    batch: scheduler.ScheduleBatch,
    *args: Any,
    **kwargs: Any,
) -> Any:
    here = runtime.current()
    kind = Kind.DECODE if batch.forward_mode.is_decode() else Kind.PREFILL
    with here.step(owner.forward_ct + 1, kind):
        here.announce(scheduler.num_rows_of(batch))
        here.exchange.launched()
        result = run_batch(owner, batch, *args, **kwargs)
        here.announce_next(_forecast(owner, batch))
    here.board.load.count_tokens(load.num_tokens_of(owner, batch))
    _show_load(owner, batch)
    return result


def _around_process_result(
    process_batch_result: Callable[..., None],
    owner: scheduler.Scheduler,
    batch: scheduler.ScheduleBatch,
    result: scheduler.GenerationBatchResult,
) -> None:
    """Before anybody looks at the results of a step that goes on by itself: was it given up?"""
    here = runtime.current()
    if here.exchange.runs_ahead:
        scheduler.wait_until_there(result)
        here.finish_step()
    process_batch_result(owner, batch, result)


def _forecast(owner: scheduler.Scheduler, batch: scheduler.ScheduleBatch) -> Forecast | None:
    num_rows = scheduler.forecast_rows(owner, batch)
    if num_rows is None:
        return Forecast(kind=Kind.PREFILL, num_rows=0)
    return Forecast(kind=Kind.DECODE, num_rows=num_rows) if num_rows else None


def _around_idle(on_idle: Callable[..., None], owner: scheduler.Scheduler) -> None:
    here = runtime.current()
    here.announce_idle()
    if here.board.load.is_stale():
        _show_load(owner, None)
    on_idle(owner)


def _show_load(owner: scheduler.Scheduler, batch: scheduler.ScheduleBatch | None) -> None:
    runtime.current().board.load.show(
        SchedulerLoad(
            num_running=load.num_running(owner, batch),
            num_waiting=load.num_waiting(owner),
            free_kv_tokens=load.free_kv_tokens(owner),
        ),
        is_idle=batch is None,
    )


def _die(error: AfdError) -> NoReturn:
    """End the whole server with one line; the signal tells SGLang's parent that a child failed."""
    sys.stderr.write(f"sglang-afd: error: {error}\n")
    sys.stderr.flush()
    os.kill(os.getppid(), signal.SIGQUIT)
    os._exit(1)
