"""What a scheduler process of the attention role holds: its link, its step, its model's spec."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from sglang_afd import __version__
from sglang_afd.attn.announcer import Announcer, Forecast
from sglang_afd.attn.attach import Attacher
from sglang_afd.attn.exchange import Step, StepExchange, kind_of
from sglang_afd.attn.open_exchange import open_exchange
from sglang_afd.attn.status import StatusBoard
from sglang_afd.attn.step_timer import HostTimer, StepTimer, StreamTimer
from sglang_afd.config import AUTO_GRAPH_SLOTS, FP8, MAX_STEP_SHARE, AfdConfig, Transport
from sglang_afd.errors import AfdError, UpstreamMismatch
from sglang_afd.protocol import auth
from sglang_afd.protocol.messages import Kind, ModelSpec
from sglang_afd.rounds.choice import build_choice
from sglang_afd.trace import attn as timeline
from sglang_afd.transport.zmq_link import LinkOptions
from sglang_afd.upstream.moe import FusedMoE
from sglang_afd.upstream.server_args import ServerArgs, model_fingerprint, resolve_transport
from sglang_afd.upstream.versions import check_version
from sglang_afd.upstream.weights import ReadCount

_current: Runtime | None = None

GRAPH_NUMBERS = tuple(range(1, AUTO_GRAPH_SLOTS + 1))  # each has CUDA graphs of its own


class Runtime:
    """One in a scheduler process.

    Args:
        config: Ours.
        server_args: SGLang's.
        board: Shown by the HTTP process.
        limits_steps: Is there a watchdog of SGLang's that a step must not outlast?
    """

    exchange: StepExchange  # of every layer's rows; there once the model was loaded

    def __init__(
        self,
        config: AfdConfig,
        server_args: ServerArgs,
        board: StatusBoard,
        *,
        limits_steps: bool = True,
    ) -> None:
        self.config = config = resolve_transport(config, is_cuda=server_args.device == "cuda")
        self.board = board
        self.read_count = ReadCount()
        self.is_on_device = config.transport == Transport.CUDA_IPC
        self.timer: StepTimer
        if self.is_on_device:
            self.choice = build_choice(config.num_micro_batches, GRAPH_NUMBERS)
            self.timer = StreamTimer(self.choice)
        else:
            self.choice = build_choice(config.num_micro_batches)
            self.timer = HostTimer(self.choice)
        self._server_args = server_args
        limit_s = server_args.watchdog_timeout * MAX_STEP_SHARE
        self._step_limit_s = limit_s if limits_steps and limit_s > 0 else float("inf")
        self._attacher: Attacher[Any] | None = None
        self._announcer = Announcer()
        self.num_steps = 0  # that ran to their end
        self.num_micro_batches = 1  # of the running step; set by what cuts it
        self.is_in_step = False
        self._step = Step(number=0, kind=Kind.DECODE, deadline_s=float("inf"))
        self._server_id = f"attn-{server_args.port}-{secrets.token_hex(5)}"
        self._timeline = timeline.begin(config.trace_file, self._server_id)

    def adopt_model(
        self, model: nn.Module, *, architecture: str, dtype: str, device_index: int
    ) -> None:
        """Check that every MoE layer is remote, and make ready to attach.

        Args:
            model: Just loaded; memory for its key-value cache is not sized yet.
            architecture: Its name.
            dtype: Of its hidden states.
            device_index: Of the GPU that it is on.

        Raises:
            UpstreamMismatch: A layer's experts are local, so the model would be served unsplit.
            ConfigError: The rows of this model cannot travel as asked.
        """
        spec = self._spec_of(model, architecture, dtype)
        self._show_weights()
        self.board.update(
            boot_id=self._server_id, fingerprint=spec.fingerprint, num_experts=spec.num_experts
        )
        options = LinkOptions(
            server_id=self._server_id,
            spec=spec,
            secret=auth.load_secret(self.config.secret_file),
            heartbeat_timeout_s=self.config.heartbeat_timeout_s,
            stall_timeout_s=self.config.stall_timeout_s,
        )
        self._attacher, self.exchange = open_exchange(
            self.config,
            options,
            self.board,
            device_index=device_index,
            step_limit_s=self._step_limit_s,
            timeline=self._timeline,
        )

    def _spec_of(self, model: nn.Module, architecture: str, dtype: str) -> ModelSpec:
        first, layer_ids = _remote_layers(model, architecture)
        return ModelSpec(
            package_version=__version__,
            sglang_version=check_version(),
            fingerprint=model_fingerprint(self._server_args),
            architecture=architecture,
            dtype=dtype,
            hidden_size=first.hidden_size,
            top_k=first.top_k,
            num_experts=first.num_experts,
            moe_layer_ids=layer_ids,
            max_rows=self.config.max_rows,
            transport=self.config.transport,
            dispatch_dtype=FP8 if self.config.dispatch_dtype == FP8 else dtype,
        )

    def wait_attached(self) -> None:
        """Before the first request; errors as in `Attacher.wait_first`."""
        self.exchange.start()
        self._attacher_or_raise().wait_first(self.config.attach_timeout_s)

    def close(self) -> None:
        """Say goodbye to the MLP servers."""
        self._attacher_or_raise().close()
        self.exchange.close()

    def hold_requests(self) -> None:
        """Outside `step()`: requests wait for another stall timeout from now on."""
        self._attacher_or_raise().hold()

    def wait_attached_again(self, timeout_s: float) -> bool:
        """Outside `step()`: are MLP servers attached, after `timeout_s` at the latest?"""
        return self._attacher_or_raise().wait_attached(timeout_s)

    @contextmanager
    def step(self, number: int, kind: Kind) -> Iterator[None]:
        """Around each forward.

        Args:
            number: Of the step; the MLP servers tell its exchanges by it.
            kind: What its rows are.
        """
        self.num_micro_batches = 1
        deadline_s = time.monotonic() + self._step_limit_s
        self._step = Step(number=number, kind=kind, deadline_s=deadline_s)
        with self._attacher_or_raise().use():
            if self._timeline is not None:
                self._timeline.step_begins(number, kind)
            self.is_in_step = True
            try:
                self.exchange.begin(self._step)
                yield
                self.num_steps += not self.exchange.runs_ahead
                self.board.count_step(self.num_micro_batches)
            finally:
                self.is_in_step = False
                self.exchange.end()
                if self._timeline is not None:
                    self._timeline.step_ends()

    def next_step(self) -> int:
        """The number of the next step where nobody else counts them."""
        return self._step.number + 1

    def check(self) -> None:
        """Raise StallTimeout when what was launched last was given up."""
        self.exchange.check()

    def finish_step(self) -> None:
        """The results of the oldest step that was launched are there; they are worthless when this
        raises StallTimeout.
        """
        self.exchange.finished()
        self.num_steps += self.exchange.runs_ahead

    def announce(self, num_rows: int) -> None:
        """Inside `step()`: tell rank 0 of it, if one is attached."""
        link = self._attacher_or_raise().take_now()
        if link is not None:
            kind, number = self._plan(self._step.kind, num_rows)
            self._announcer.step_begins(link, self._step.number, kind, num_rows, number)

    def announce_next(self, forecast: Forecast | None) -> None:
        """Inside `step()`, once it was launched: tell rank 0 what will follow it."""
        link = self._attacher_or_raise().take_now()
        if link is not None:
            number = 1
            if forecast is not None:
                kind, number = self._plan(forecast.kind, forecast.num_rows)
                forecast = replace(forecast, kind=kind)
            self._announcer.step_launched(link, self._step.number, forecast, number)

    def announce_idle(self) -> None:
        """Outside `step()`: nothing is to come."""
        if self._announcer.is_awaited:
            with self._attacher_or_raise().use():
                self._announcer.idle(self._attacher_or_raise().take_now())

    def _plan(self, kind: Kind, num_rows: int) -> tuple[Kind, int]:
        """As what and in how many micro-batches a step of so many rows will be sent."""
        number = max(1, self.choice.choose(num_rows, is_prefill=kind is Kind.PREFILL))
        return kind_of(kind, -(-num_rows // number), self.exchange.max_rows), number

    def _show_weights(self) -> None:
        count = self.read_count
        self.board.update(
            weights={
                "num_tensors_read": count.num_tensors,
                "num_expert_tensors_read": count.num_expert_tensors,
                "num_tensors_skipped": count.num_skipped,
                "num_bytes_read": count.num_bytes,
            }
        )

    def _attacher_or_raise(self) -> Attacher[Any]:
        if self._attacher is None:
            raise AfdError("the model was loaded without its hook; nothing attaches")
        return self._attacher


def _remote_layers(model: nn.Module, architecture: str) -> tuple[FusedMoE, tuple[int, ...]]:
    """The first MoE layer, and the ids of all of them, ascending."""
    from sglang_afd.attn.remote_moe import RemoteFusedMoE

    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    local = [layer for layer in layers if not isinstance(layer, RemoteFusedMoE)]
    if local or not layers:
        raise UpstreamMismatch(
            f"{architecture} has {len(local)} MoE layers with local experts of {len(layers)}; "
            f"the hook on SGLang's MoE class did not reach it, so it cannot be split"
        )
    if any(True for layer in layers for _ in layer.parameters()):
        raise UpstreamMismatch(f"{architecture} allocated expert weights on the attention side")
    return layers[0], tuple(sorted(layer.layer_id for layer in layers))


def install(runtime: Runtime) -> None:
    """Make `runtime` this process's."""
    global _current
    _current = runtime


def current() -> Runtime:
    """This process's runtime."""
    if _current is None:
        raise AfdError("this process is no attention scheduler; no runtime was installed")
    return _current
