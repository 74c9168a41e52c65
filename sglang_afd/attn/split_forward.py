"""Around the inner model's forward: choose a number of micro-batches, cut, run, put together."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sglang_afd.attn.micro_batch import Slice, run_in_turns
from sglang_afd.attn.runtime import Runtime
from sglang_afd.errors import UpstreamMismatch
from sglang_afd.rounds.splitting import Part, split
from sglang_afd.upstream import inner_model
from sglang_afd.upstream.forward_batch import (
    ForwardBatch,
    ForwardMode,
    make_child,
    rows_of_sequences,
)
from sglang_afd.upstream.forward_state import ForwardContext

Forward = Callable[..., Any]


class SplitForward:
    """The hook on the inner model's forward; other instances of its class run as they are."""

    def __init__(self, runtime: Runtime, runner: inner_model.ModelRunner, inner: nn.Module) -> None:
        self._runtime = runtime
        self._runner = runner
        self._inner = inner
        self._signature = inspect.signature(type(inner).forward)
        self._contexts: list[ForwardContext] = []

    def __call__(self, forward: Forward, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` once, or once for each micro-batch."""
        if model is not self._inner:
            return forward(model, *args, **kwargs)
        bound = self._signature.bind(model, *args, **kwargs)
        batch: ForwardBatch = bound.arguments["forward_batch"]
        rows = rows_of_sequences(batch)
        if rows is None:
            return forward(model, *args, **kwargs)
        is_prefill = batch.forward_mode != ForwardMode.DECODE
        num_rows = sum(rows)
        choice = self._runtime.choice
        number = choice.choose(num_rows, is_prefill=is_prefill)
        may_cut_inside = inner_model.may_cut_inside(self._runner)
        parts = split(rows, number, may_cut_inside=may_cut_inside)
        self._runtime.num_micro_batches = len(parts)
        started_s = time.perf_counter()
        if len(parts) == 1:
            result = forward(model, *args, **kwargs)
        else:
            result = self._run(forward, bound.arguments, rows, parts)
        duration_s = time.perf_counter() - started_s
        choice.observe(num_rows, len(parts), duration_s, is_prefill=is_prefill)
        return result

    def _run(
        self, forward: Forward, arguments: dict[str, Any], rows: Sequence[int], parts: list[Part]
    ) -> Any:
        missing = len(parts) - len(self._contexts)
        self._contexts += inner_model.contexts_of_micro_batches(self._runner, missing)
        slices = []
        for part, context in zip(parts, self._contexts, strict=False):
            child = make_child(arguments["forward_batch"], rows, part)
            run = functools.partial(forward, **_arguments_of(arguments, child, part))
            slices.append(
                Slice(
                    num_rows=part.num_rows,
                    forward=functools.partial(_plan_and_run, context, child, run),
                    context=context,
                )
            )
        return merge(run_in_turns(slices))


def _plan_and_run(context: ForwardContext, child: ForwardBatch, run: Callable[[], Any]) -> Any:
    context.attn_backend.init_forward_metadata(child)
    return run()


def _arguments_of(arguments: dict[str, Any], child: ForwardBatch, part: Part) -> dict[str, Any]:
    own = dict(arguments)
    for name, value in arguments.items():
        match name, value:
            case "forward_batch", _:
                own[name] = child
            case (("input_ids" | "input_embeds"), Tensor()):
                own[name] = value[part.first_row : part.stop_row]
            case "positions", Tensor():
                own[name] = value[..., part.first_row : part.stop_row]
            case _, (None | nn.Module()):
                pass
            case _:
                raise UpstreamMismatch(
                    f"the model's forward was given {name}={type(value).__name__}, which cannot be "
                    f"cut into micro-batches; start this server with --afd-num-micro-batches 1"
                )
    return own


def merge(results: Sequence[Any]) -> Any:
    """Put together what the inner model returned for each micro-batch, in order.

    Args:
        results: Hidden states, [T, H] each, or tuples and lists of such, as with auxiliary hidden
            states.
    """
    first = results[0]
    match first:
        case Tensor():
            return torch.cat(list(results))
        case tuple() | list():
            return type(first)(merge(same) for same in zip(*results, strict=True))
        case None:
            return None
        case _:
            raise UpstreamMismatch(
                f"the model returned {type(first).__name__}, which cannot be put together from "
                f"micro-batches; start this server with --afd-num-micro-batches 1"
            )
