"""The attention role without SGLang's scheduler: for whoever runs a `ModelRunner` by hand.

`install`, then build the `ModelRunner` (load, memory pool, attention backends, CUDA graphs), then
`wait_attached`, then forwards. Steps number themselves; `runtime.check` after a forward has ended
tells whether its results are worth anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from sglang_afd.attn import model_hooks, runtime
from sglang_afd.attn.runtime import Runtime
from sglang_afd.attn.status import StatusBoard
from sglang_afd.config import AfdConfig
from sglang_afd.errors import AfdError
from sglang_afd.protocol.messages import Kind
from sglang_afd.upstream import hooks, scheduler
from sglang_afd.upstream.server_args import ServerArgs


def install(config: AfdConfig, server_args: ServerArgs) -> Runtime:
    """Put the attention role's hooks into this process, once.

    Args:
        config: Ours.
        server_args: SGLang's, resolved; as `parse_server_args` makes them for this role.

    Returns: The runtime; `wait_attached` and `close` are for the caller.
    Raises:
        UpstreamMismatch: A hook did not take.
        ConfigError: Rows cannot travel as asked.
    """
    here = Runtime(config, server_args, StatusBoard(), limits_steps=False)
    runtime.install(here)
    hooks.install(
        [
            *model_hooks.build_hooks(_raise),
            hooks.Hook(target=scheduler.FORWARD_HOOK, type=hooks.AROUND, function=_around_forward),
        ]
    )
    return here


def _around_forward(
    forward: Callable[..., Any],
    runner: scheduler.ModelRunner,
    forward_batch: scheduler.ForwardBatch,
    *args: Any,
    **kwargs: Any,
) -> Any:
    here = runtime.current()
    if here.is_in_step or runner.is_draft_worker:
        return forward(runner, forward_batch, *args, **kwargs)
    kind = Kind.DECODE if forward_batch.forward_mode.is_decode() else Kind.PREFILL
    with here.step(here.next_step(), kind):
        here.announce(int(forward_batch.positions.shape[-1]))
        here.exchange.finished()  # nobody else says so of the step before
        here.exchange.launched()
        return forward(runner, forward_batch, *args, **kwargs)


def _raise(error: AfdError) -> NoReturn:
    raise error
