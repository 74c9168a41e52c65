"""Around the inner model's forward: choose a number of micro-batches, cut, run, put together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sglang_afd.attn.micro_batch import Slice, run_in_turns
from sglang_afd.attn.runtime import Runtime
from sglang_afd.attn.step_graphs import StepGraphs
from sglang_afd.errors import UpstreamMismatch
from sglang_afd.protocol.messages import Kind
from sglang_afd.rounds.splitting import Part, split
from sglang_afd.upstream import inner_model
from sglang_afd.upstream.forward_batch import (
    ForwardBatch,
    ForwardMode,
    keeps_hidden_states,
    make_child,
    of_graph,
    rows_of_sequences,
)
from sglang_afd.upstream.forward_state import ForwardContext

Forward = Callable[..., Any]


class SplitForward:
    """The hook on the inner model's forward; other instances of its class run as they are.

    Args:
        runtime: Of this process.
        runner: Whose model it is.
        inner: Its inner model.
        backends: Attention of each micro-batch.
        graphs: Says when a forward is captured; None where no graph is.
    """

    def __init__(
        self,
        runtime: Runtime,
        runner: inner_model.ModelRunner,
        inner: nn.Module,
        backends: inner_model.MicroBatchBackends,
        graphs: StepGraphs | None,
    ) -> None:
        self._runtime = runtime
        self._runner = runner
        self._inner = inner
        self._backends = backends
        self._graphs = graphs
        self._signature = inspect.signature(type(inner).forward)

    def __call__(self, forward: Forward, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` once, or once for each micro-batch."""
        if model is not self._inner:
            return forward(model, *args, **kwargs)
        arguments = self._signature.bind(model, *args, **kwargs).arguments
        batch: ForwardBatch = arguments["forward_batch"]
        whole = functools.partial(forward, model, *args, **kwargs)
        if self._graphs is None or self._graphs.captured_number is None:
            return self._run_eagerly(forward, arguments, batch, whole)
        if self._graphs.captured_number == 1:
            # What is handed to clients must not lie in a slot: the next step's first exchange,
            # launched before it is copied, would write over it.
            return merge([whole()]) if keeps_hidden_states(batch) else whole()
        return self._capture(forward, arguments, of_graph(batch), self._graphs.captured_number)

    def _run_eagerly(
        self,
        forward: Forward,
        arguments: dict[str, Any],
        batch: ForwardBatch,
        whole: Callable[[], Any],
    ) -> Any:
        here = self._runtime
        rows = rows_of_sequences(batch)
        is_prefill = batch.forward_mode != ForwardMode.DECODE
        if rows is None:
            parts = []
            num_rows = most_rows = int(batch.positions.shape[-1])
        else:
            num_rows = sum(rows)
            number = here.choice.choose(num_rows, is_prefill=is_prefill)
            may_cut_inside = inner_model.may_cut_inside(self._runner)
            parts = split(rows, number, may_cut_inside=may_cut_inside)
            most_rows = max(part.num_rows for part in parts)
        here.num_micro_batches = max(1, len(parts))
        here.exchange.stage(
            Kind.PREFILL if is_prefill else Kind.DECODE,
            number=here.num_micro_batches,
            num_rows=None,
            most_rows=most_rows,
        )
        if rows is None:
            return whole()
        with here.timer.time(num_rows, len(parts), is_prefill=is_prefill):
            if len(parts) == 1:
                return whole()
            return self._run(forward, arguments, batch, rows, parts, is_planned=False)

    def _capture(
        self, forward: Forward, arguments: dict[str, Any], batch: ForwardBatch, number: int
    ) -> Any:
        rows = [1] * batch.batch_size
        return self._run(forward, arguments, batch, rows, split(rows, number), is_planned=True)

    def _run(
        self,
        forward: Forward,
        arguments: dict[str, Any],
        batch: ForwardBatch,
        rows: Sequence[int],
        parts: list[Part],
        *,
        is_planned: bool,
    ) -> Any:
        slices = []
        for part, backend in zip(parts, self._backends.first(len(parts)), strict=True):
            child = make_child(batch, rows, part)
            context = inner_model.context_with(backend)
            run = functools.partial(forward, **_arguments_of(arguments, child, part))
            if not is_planned:
                run = functools.partial(_plan_and_run, context, child, run)
            slices.append(
                Slice(
                    num_rows=part.num_rows,
                    forward=run,
                    context=context,
                    first_row=part.first_row,
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
    """Put together what the inner model returned for each micro-batch, in order; in new memory.

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
