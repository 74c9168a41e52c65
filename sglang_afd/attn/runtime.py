"""What a scheduler process of the attention role holds: its link, its step, its model's spec."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from sglang_afd import __version__
from sglang_afd.attn.attach import Attacher
from sglang_afd.attn.status import StatusBoard
from sglang_afd.config import AfdConfig
from sglang_afd.errors import AfdError, PeerLost, UpstreamMismatch
from sglang_afd.protocol import auth
from sglang_afd.protocol.messages import Dispatch, Kind, ModelSpec
from sglang_afd.transport.base import Rows
from sglang_afd.transport.zmq_link import LinkOptions, ZmqLink
from sglang_afd.upstream.moe import FusedMoE
from sglang_afd.upstream.server_args import ServerArgs, model_fingerprint
from sglang_afd.upstream.versions import check_version
from sglang_afd.upstream.weights import ReadCount

MAX_STEP_SHARE = 0.75  # of SGLang's watchdog; one exchange may wait for the rest

_current: Runtime | None = None


class Runtime:
    """One in a scheduler process; the dispatchers of every layer go through it."""

    def __init__(self, config: AfdConfig, server_args: ServerArgs, board: StatusBoard) -> None:
        self.config = config
        self.board = board
        self.read_count = ReadCount()
        self.max_rows = config.max_rows
        self._server_args = server_args
        self._attacher: Attacher | None = None
        self._link: ZmqLink | None = None  # of the running step
        self._step = 0
        self._step_deadline_s = float("inf")
        self._kind = Kind.DECODE

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
        )
        self._attach(spec)

    def wait_attached(self) -> None:
        """Before the first request; errors as in `Attacher.wait_first`."""
        self._attacher_or_raise().wait_first(self.config.attach_timeout_s)

    @contextmanager
    def step(self, number: int, kind: Kind) -> Iterator[None]:
        """Around each forward.

        Raises:
            PeerLost: No MLP servers are attached.
        """
        self._step, self._kind = number, kind
        limit_s = self._server_args.watchdog_timeout * MAX_STEP_SHARE
        self._step_deadline_s = time.monotonic() + limit_s if limit_s > 0 else float("inf")
        with self._attacher_or_raise().use() as self._link:
            try:
                yield
            finally:
                self._link = None

    def send(self, layer_id: int, micro_batch_id: int, rows: Rows) -> None:
        """Dispatch one piece of one layer; errors as in `Link.dispatch`."""
        link = self._link_or_raise()
        header = Dispatch(
            epoch=link.epoch,
            step=self._step,
            layer_id=layer_id,
            micro_batch_id=micro_batch_id,
            num_rows=rows.hidden_states.shape[0],
            kind=self._kind,
            num_micro_batches=1,
        )
        link.dispatch(header, rows)

    def receive(self, micro_batch_id: int) -> Tensor:
        """The sum of what was dispatched in this slot; errors as in `Link.combine`."""
        link = self._link_or_raise()
        total = link.combine(micro_batch_id)
        if time.monotonic() > self._step_deadline_s:
            link.mark_lost(
                f"step {self._step} took longer than {MAX_STEP_SHARE:.0%} of --watchdog-timeout, "
                f"after which SGLang would end this server"
            )
        return total

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
            server_id=f"attn-{self._server_args.port}-{secrets.token_hex(3)}",
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
            raise PeerLost("rows were dispatched outside a step")
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
