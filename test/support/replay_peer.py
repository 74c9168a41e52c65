"""An attention server without attention: real dispatchers walk through a recorded trace.

Command line, hooks, MoE layers, link and attaching are an attention server's own; SGLang's
scheduler and everything outside the MoE layers is missing. The zygote forks it. It goes on until
SIGTERM, then leaves in order and writes its report; a wrong sum ends it at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import replay_trace
import torch
from replay import Plan, Report
from replay_trace import LayerCall, Step

from sglang_afd import cli
from sglang_afd.attn import micro_batch, runtime
from sglang_afd.attn.announcer import Forecast
from sglang_afd.attn.remote_moe import RemoteFusedMoE
from sglang_afd.attn.runtime import Runtime
from sglang_afd.attn.scheduler import build_hooks
from sglang_afd.attn.status import StatusBoard
from sglang_afd.errors import AfdError, PeerLost
from sglang_afd.protocol.messages import Kind
from sglang_afd.upstream import environment, hooks
from sglang_afd.upstream.moe import StandardTopKOutput
from sglang_afd.upstream.server_args import parse_server_args

ERROR_BOUND = 1e-5  # of the largest value of a sum; fp32, other kernels and another order
LEAVE_S = 60.0


class WrongSum(Exception):
    """A combine returned something else than the trace says."""


def main(argv: Sequence[str]) -> int:
    """Walk as `TEST_REPLAY` says; returns 0 when every sum was right."""
    plan = msgspec.json.decode(os.environ["TEST_REPLAY"], type=Plan)
    must_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: must_stop.append(number))
    torch.set_num_threads(1)
    walker = Walker(plan, _attach(argv))
    error = ""
    try:
        with torch.inference_mode():
            while not must_stop:
                walker.step()
    except (AfdError, WrongSum) as failure:
        error = f"{type(failure).__name__}: {failure}"
    _leave()
    report = Report(
        num_steps=walker.num_steps, largest_error=walker.largest_error, error=error or ""
    )
    Path(plan.report).write_bytes(msgspec.json.encode(report))
    return int(bool(error))


class Walker:
    """Steps like an attention server's scheduler, layer by layer."""

    def __init__(self, plan: Plan, layers: list[RemoteFusedMoE]) -> None:
        self.num_steps = 0  # of decode
        self.num_forwards = 0
        self.largest_error = 0.0
        self._plan = plan
        self._layers = layers
        self._trace = replay_trace.load(Path(plan.trace), plan.part)
        self._progress = os.open(plan.progress, os.O_WRONLY | os.O_CREAT, 0o600)

    def step(self) -> None:
        """One decode step, and before it whatever the plan puts there."""
        if self._is_due(self._plan.prefill_every):
            self._forward(self._trace.prefill, Kind.PREFILL)
        if self._is_due(self._plan.pause_every):
            runtime.current().announce_idle()
            time.sleep(self._plan.pause_s)
        self._forward(self._trace.decode[self.num_steps % len(self._trace.decode)], Kind.DECODE)
        os.pwrite(self._progress, b"%012d" % self.num_steps, 0)

    def _is_due(self, every: int) -> bool:
        return bool(every) and self.num_steps % every == 0

    def _forward(self, step: Step, kind: Kind) -> None:
        """As the hook on SGLang's `run_batch` does: announce, run, say what follows."""
        here = runtime.current()
        num_rows = len(step[0].hidden_states)
        with here.step(self.num_forwards + 1, kind):
            here.announce(num_rows)
            self._run(step, num_rows)
            self.num_forwards += 1
            self.num_steps += kind is Kind.DECODE
            prefills = kind is Kind.DECODE and self._is_due(self._plan.prefill_every)
            here.announce_next(
                Forecast(kind=Kind.PREFILL, num_rows=0)
                if prefills
                else Forecast(kind=Kind.DECODE, num_rows=len(self._trace.decode[0][0].expected))
            )

    def _run(self, step: Step, num_rows: int) -> None:
        number = min(self._plan.num_micro_batches, num_rows)
        if number == 1:
            self._walk(step, 1)
            return
        bounds = [num_rows * index // number for index in range(number + 1)]
        micro_batch.run_in_turns(
            [
                micro_batch.Slice(
                    num_rows=stop - start,
                    forward=partial(self._walk, [call.rows(start, stop) for call in step], number),
                    context=None,
                )
                for start, stop in pairwise(bounds)
            ]
        )

    def _walk(self, step: Step, num_micro_batches: int) -> None:
        for layer, call in zip(self._layers, step, strict=True):
            time.sleep(self._plan.attention_s / num_micro_batches)
            topk = StandardTopKOutput(call.topk_weights, call.topk_ids, torch.empty(0))
            self._check(layer.layer_id, call, layer(call.hidden_states, topk))

    def _check(self, layer_id: int, call: LayerCall, got: torch.Tensor) -> None:
        error = float((got - call.expected).abs().max() / call.expected.abs().max())
        self.largest_error = max(self.largest_error, error)
        if not error <= ERROR_BOUND:  # also where it is no number
            row = int((got - call.expected).abs().amax(1).argmax())
            raise WrongSum(
                f"step {self.num_steps}, layer {layer_id}: sum is off by {error:.2e} of its "
                f"largest value, most in row {row} of {len(got)}"
            )


def _attach(argv: Sequence[str]) -> list[RemoteFusedMoE]:
    config, rest = cli.parse(argv)
    server_args = parse_server_args(rest, config).server_args
    runtime.install(Runtime(config, server_args, StatusBoard()))
    hooks.install(build_hooks())
    model_config = environment.enter_process(server_args)
    whole = environment.ExpertShard(rank=0, ep_size=1, num_experts=1)
    model = environment.build_skeleton(server_args, model_config, whole)
    runtime.current().adopt_model(
        model,
        architecture=model_config.hf_config.architectures[0],
        dtype=str(model_config.dtype).removeprefix("torch."),
        device_index=server_args.base_gpu_id,
    )
    runtime.current().wait_attached()
    layers = [module for module in model.modules() if isinstance(module, RemoteFusedMoE)]
    return sorted(layers, key=lambda layer: layer.layer_id)


def _leave() -> None:
    """Say goodbye; real attention servers are ended by SGLang and only vanish."""
    attacher = runtime.current()._attacher_or_raise()

    def find_nobody() -> list[str]:
        raise PeerLost("this peer is leaving")

    attacher._find = find_nobody  # type: ignore[method-assign]
    link = attacher._link or attacher._fresh
    if link is None or link.lost is not None:
        return
    link.close()
    deadline_s = time.monotonic() + LEAVE_S
    while not link._context.closed and time.monotonic() < deadline_s:
        time.sleep(0.01)
