"""What a scheduler process of the attention role holds: its link, its step, its model's spec."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, nn

from sglang_afd import __version__
from sglang_afd.attn.announcer import Announcer, Forecast
from sglang_afd.attn.attach import Attacher
from sglang_afd.attn.micro_batch import MicroBatch
from sglang_afd.attn.status import StatusBoard
from sglang_afd.config import MAX_STEP_SHARE, AfdConfig
from sglang_afd.errors import AfdError, ExchangeFailed, PeerLost, StallTimeout, UpstreamMismatch
from sglang_afd.protocol import auth
from sglang_afd.protocol.messages import Dispatch, Kind, ModelSpec
from sglang_afd.rounds.choice import build_choice
from sglang_afd.trace import attn as timeline
from sglang_afd.transport.base import Rows
from sglang_afd.transport.zmq_link import LinkOptions, ZmqLink
from sglang_afd.upstream.moe import FusedMoE
from sglang_afd.upstream.server_args import ServerArgs, model_fingerprint
from sglang_afd.upstream.versions import check_version
from sglang_afd.upstream.weights import ReadCount

_current: Runtime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    """An exchange whose sum is not there yet; it is sent again when the MLP servers were lost."""

    layer_id: int
    micro_batch: MicroBatch
    rows: Rows


class Runtime:
    """One in a scheduler process; the dispatchers of every layer go through it."""

    def __init__(self, config: AfdConfig, server_args: ServerArgs, board: StatusBoard) -> None:
        self.config = config
        self.board = board
        self.read_count = ReadCount()
        self.max_rows = config.max_rows
        self.choice = build_choice(config.num_micro_batches)
        self._server_args = server_args
        self._attacher: Attacher | None = None
        self._link: ZmqLink | None = None  # of the running step; taken when it first sends
        self._pending: dict[int, _Pending] = {}  # by micro-batch
        self._announcer = Announcer()
        self.num_steps = 0  # that ran to their end
        self.num_micro_batches = 1  # of the running step; set by what cuts it
        self._step = 0
        self._step_deadline_s = float("inf")
        self._kind = Kind.DECODE
        self._server_id = f"attn-{server_args.port}-{secrets.token_hex(3)}"
        self._timeline = timeline.begin(config.trace_file, self._server_id)

    def adopt_model(self, model: nn.Module, *, architecture: str, dtype: str) -> None:
        """Check that every MoE layer is remote, and begin to attach.

        Raises:
            UpstreamMismatch: A layer's experts are local, so the model would be served unsplit.
        """
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
        first = layers[0]
        spec = ModelSpec(
            package_version=__version__,
            sglang_version=check_version(),
            fingerprint=model_fingerprint(self._server_args),
            architecture=architecture,
            dtype=dtype,
            hidden_size=first.hidden_size,
            top_k=first.top_k,
            num_experts=first.num_experts,
            moe_layer_ids=tuple(sorted(layer.layer_id for layer in layers)),
            max_rows=self.max_rows,
            transport="zmq",
            dispatch_dtype=dtype,
        )
        self._attach(spec)

    def wait_attached(self) -> None:
        """Before the first request; errors as in `Attacher.wait_first`."""
        self._attacher_or_raise().wait_first(self.config.attach_timeout_s)

    def close(self) -> None:
        """Say goodbye to the MLP servers."""
        self._attacher_or_raise().close()

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
        self._step, self._kind, self.num_micro_batches = number, kind, 1
        limit_s = self._server_args.watchdog_timeout * MAX_STEP_SHARE
        self._step_deadline_s = time.monotonic() + limit_s if limit_s > 0 else float("inf")
        with self._attacher_or_raise().use():
            if self._timeline is not None:
                self._timeline.step_begins(number, kind)
            try:
                yield
                self.num_steps += 1
                self.board.count_step(self.num_micro_batches)
            finally:
                self._end_step()
                if self._timeline is not None:
                    self._timeline.step_ends()

    def announce(self, num_rows: int) -> None:
        """Inside `step()`: tell rank 0 of it, if one is attached."""
        link = self._attacher_or_raise().take_now()
        if link is not None:
            kind, number = self._plan(self._kind, num_rows)
            self._announcer.step_begins(link, self._step, kind, num_rows, number)

    def announce_next(self, forecast: Forecast | None) -> None:
        """Inside `step()`, once it was launched: tell rank 0 what will follow it."""
        link = self._attacher_or_raise().take_now()
        if link is not None:
            number = 1
            if forecast is not None:
                kind, number = self._plan(forecast.kind, forecast.num_rows)
                forecast = replace(forecast, kind=kind)
            self._announcer.step_launched(link, self._step, forecast, number)

    def announce_idle(self) -> None:
        """Outside `step()`: nothing is to come."""
        if self._announcer.is_awaited:
            with self._attacher_or_raise().use():
                self._announcer.idle(self._attacher_or_raise().take_now())

    def send(self, layer_id: int, micro_batch: MicroBatch, rows: Rows) -> None:
        """Dispatch one piece of one layer; waits only while no MLP servers are attached.

        Raises:
            StallTimeout: They did not come back in time.
        """
        self._pending[micro_batch.id] = _Pending(
            layer_id=layer_id, micro_batch=micro_batch, rows=rows
        )
        if self._link is None:
            self._send_pending(time.monotonic())
            return
        try:
            self._dispatch(self._link, micro_batch.id)
        except PeerLost:
            self._send_pending(time.monotonic())

    def receive(self, micro_batch_id: int) -> Tensor:
        """The sum of what was dispatched in this slot, whichever MLP servers add it up.

        Raises:
            ExchangeFailed: The experts raised on these rows.
            StallTimeout: The MLP servers were lost, and did not come back in time.
        """
        waiting_since_s = time.monotonic()
        started_ns = time.monotonic_ns() if self._timeline is not None else 0
        while True:
            try:
                link = self._link_or_raise()
                total = link.combine(micro_batch_id, limit_s=self._step_deadline_s)
                break
            except ExchangeFailed:
                raise
            except PeerLost:
                self._check_time()
                self._send_pending(waiting_since_s)
                waiting_since_s = time.monotonic()
        del self._pending[micro_batch_id]
        if self._timeline is not None:
            self._timeline.combined(micro_batch_id, started_ns, link.epoch, link.received_ns)
        self._check_time()
        return total

    def _check_time(self) -> None:
        if time.monotonic() >= self._step_deadline_s:
            raise StallTimeout(
                f"step {self._step} took longer than {MAX_STEP_SHARE:.0%} of --watchdog-timeout, "
                f"after which SGLang would end this server"
            )

    def _send_pending(self, waiting_since_s: float) -> None:
        """Wait for MLP servers, and send them every exchange that has no sum yet."""
        started_ns = time.monotonic_ns() if self._timeline is not None else 0
        while True:
            link = self._attacher_or_raise().take(
                waiting_since_s=waiting_since_s, limit_s=self._step_deadline_s
            )
            if self._timeline is not None:
                self._timeline.taken(link.epoch, started_ns)
            try:
                for micro_batch_id in self._pending:
                    self._dispatch(link, micro_batch_id)
            except PeerLost:
                continue
            self._link = link
            return

    def _dispatch(self, link: ZmqLink, micro_batch_id: int) -> None:
        pending = self._pending[micro_batch_id]
        header = Dispatch(
            epoch=link.epoch,
            step=self._step,
            layer_id=pending.layer_id,
            micro_batch_id=micro_batch_id,
            num_rows=pending.rows.hidden_states.shape[0],
            kind=self._kind_of(self._kind, pending.micro_batch.most_rows),
            num_micro_batches=pending.micro_batch.number,
        )
        started_ns = time.monotonic_ns() if self._timeline is not None else 0
        link.dispatch(header, pending.rows)
        if self._timeline is not None:
            self._timeline.dispatched(header, started_ns)

    def _plan(self, kind: Kind, num_rows: int) -> tuple[Kind, int]:
        """As what and in how many micro-batches a step of so many rows will be sent."""
        number = max(1, self.choice.choose(num_rows, is_prefill=kind is Kind.PREFILL))
        return self._kind_of(kind, -(-num_rows // number)), number

    def _kind_of(self, kind: Kind, most_rows: int) -> Kind:
        """Of a step whose largest micro-batch has `most_rows`: what goes in pieces joins no round.

        All exchanges of a step are of one kind, so that none is waited for in vain.
        """
        return Kind.PREFILL if most_rows > self.max_rows else kind

    def _end_step(self) -> None:
        if self._pending and self._link is not None:
            self._link.mark_lost(f"step {self._step} was given up with exchanges in flight")
        self._pending.clear()
        self._link = None

    def _attach(self, spec: ModelSpec) -> None:
        count = self.read_count
        self.board.update(
            weights={
                "num_tensors_read": count.num_tensors,
                "num_expert_tensors_read": count.num_expert_tensors,
                "num_tensors_skipped": count.num_skipped,
                "num_bytes_read": count.num_bytes,
            }
        )
        options = LinkOptions(
            server_id=self._server_id,
            spec=spec,
            secret=auth.load_secret(self.config.secret_file),
            heartbeat_timeout_s=self.config.heartbeat_timeout_s,
            stall_timeout_s=self.config.stall_timeout_s,
        )
        self._attacher = Attacher(self.config.mlp_url, options, self.board)
        self._attacher.start()

    def _attacher_or_raise(self) -> Attacher:
        if self._attacher is None:
            raise AfdError("the model was loaded without its hook; nothing attaches")
        return self._attacher

    def _link_or_raise(self) -> ZmqLink:
        if self._link is None:
            raise AssertionError("a sum was waited for that was never dispatched in this step")
        return self._link


def install(runtime: Runtime) -> None:
    """Make `runtime` this process's."""
    global _current
    _current = runtime


def current() -> Runtime:
    """This process's runtime."""
    if _current is None:
        raise AfdError("this process is no attention scheduler; no runtime was installed")
    return _current
