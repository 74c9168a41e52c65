"""The hooks in SGLang's scheduler process."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from sglang_afd.attn import runtime
from sglang_afd.attn.announcer import Forecast
from sglang_afd.attn.recovery import Recovery
from sglang_afd.attn.remote_moe import RemoteFusedMoE
from sglang_afd.attn.runtime import Runtime
from sglang_afd.attn.split_forward import SplitForward
from sglang_afd.attn.status import StatusBoard
from sglang_afd.config import AfdConfig
from sglang_afd.errors import AfdError, PeerLost, StallTimeout
from sglang_afd.protocol.messages import Kind
from sglang_afd.upstream import hooks, inner_model, scheduler, weights
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
    try:
        runtime.install(Runtime(config, server_args, board))
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
        hooks.Hook(target=scheduler.IDLE_HOOK, type=hooks.AROUND, function=_around_idle),
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
        if not runner.is_draft_worker:
            _install_split(runner)
    except AfdError as error:
        _die(error)


def _install_split(runner: scheduler.ModelRunner) -> None:
    """The hook that can be named only when the model is there."""
    here = runtime.current()
    if here.config.num_micro_batches == "1":
        return
    inner = inner_model.find_inner_model(runner.model)
    inner_model.keep_on_one_stream(runner.model)
    hooks.install(
        [
            hooks.Hook(
                target=inner_model.forward_hook(inner),
                type=hooks.AROUND,
                function=SplitForward(here, runner, inner),
            )
        ]
    )


def _around_event_loop(
    dispatch_event_loop: Callable[[scheduler.Scheduler], None], owner: scheduler.Scheduler
) -> None:
    """SGLang's event loop, entered again whenever a step could not be finished in it."""
    here = runtime.current()
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
            recovery.after_stall(owner, error)
        except PeerLost as error:
            recovery.after_failure(owner, error)


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
        result = run_batch(owner, batch, *args, **kwargs)
        here.announce_next(_forecast(owner, batch))
    return result


def _forecast(owner: scheduler.Scheduler, batch: scheduler.ScheduleBatch) -> Forecast | None:
    num_rows = scheduler.forecast_rows(owner, batch)
    if num_rows is None:
        return Forecast(kind=Kind.PREFILL, num_rows=0)
    return Forecast(kind=Kind.DECODE, num_rows=num_rows) if num_rows else None


def _around_idle(on_idle: Callable[..., None], owner: scheduler.Scheduler) -> None:
    runtime.current().announce_idle()
    on_idle(owner)


def _die(error: AfdError) -> NoReturn:
    """End the whole server with one line; the signal tells SGLang's parent that a child failed."""
    sys.stderr.write(f"sglang-afd: error: {error}\n")
    sys.stderr.flush()
    os.kill(os.getppid(), signal.SIGQUIT)
    os._exit(1)
