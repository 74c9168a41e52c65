"""How an MLP server serves rows: through host memory, or on the GPUs of one host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from sglang_afd.config import AfdConfig, Transport
from sglang_afd.mlp.board import Board
from sglang_afd.mlp.experts import Experts
from sglang_afd.mlp.loop import Loop
from sglang_afd.mlp.rank_order import RankOrder
from sglang_afd.protocol.handshake import Gate
from sglang_afd.trace.mlp import MlpTimeline
from sglang_afd.transport.zmq_hub import ZmqHub

if TYPE_CHECKING:
    from sglang_afd.transport.cuda_ipc.hub import CudaIpcHub


class ServesRows(Protocol):
    """One rank's end of the exchange, open to attention servers."""

    @property
    def hub(self) -> ZmqHub | CudaIpcHub:
        """Where they attach."""

    @property
    def info(self) -> dict[str, Any]:
        """For `/server_info`."""

    def run(
        self,
        board: Board,
        order: RankOrder,
        should_stop: Callable[[], bool],
        timeline: MlpTimeline | None,
    ) -> None:
        """Serve until told to stop."""


class HostServer:
    """Rows come and go through host memory; the experts run on any device."""

    def __init__(self, config: AfdConfig, gate: Gate, experts: Experts, listen: str) -> None:
        self._experts = experts
        self.info: dict[str, Any] = {}
        self.hub = ZmqHub(gate, listen, heartbeat_timeout_s=config.heartbeat_timeout_s)

    def run(
        self,
        board: Board,
        order: RankOrder,
        should_stop: Callable[[], bool],
        timeline: MlpTimeline | None,
    ) -> None:
        """See `ServesRows`."""
        Loop(self.hub, self._experts, board, order, should_stop, timeline).run()


def open_exchange(
    config: AfdConfig, gate: Gate, experts: Experts, listen: str, *, has_rounds: bool
) -> ServesRows:
    """Listen for attention servers, as the identity in `gate` tells them.

    Raises:
        ConfigError: The address is taken, or rows of this model cannot travel so.
    """
    if gate.identity.spec.transport == Transport.ZMQ:
        return HostServer(config, gate, experts, listen)
    # NOTE: this needs CUDA's Python bindings, which a machine without a GPU may lack.
    from sglang_afd.mlp.device_server import DeviceServer

    return DeviceServer(config, gate, experts, listen, has_rounds=has_rounds)
