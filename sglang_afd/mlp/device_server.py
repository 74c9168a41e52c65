"""What an MLP server needs to serve rows that stay on the GPU: table, graphs, hub, loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch

from sglang_afd.config import AfdConfig
from sglang_afd.mlp.board import Board
from sglang_afd.mlp.device_graphs import Graphs, capture, capture_nothing, warm_up
from sglang_afd.mlp.device_loop import DeviceLoop
from sglang_afd.mlp.device_units import DeviceUnits
from sglang_afd.mlp.device_watch import DeviceWatch, device_failed
from sglang_afd.mlp.experts import Experts
from sglang_afd.mlp.rank_order import RankOrder
from sglang_afd.mlp.rehearsal import Rehearsal
from sglang_afd.mlp.row_buckets import RowBuckets, graph_rows
from sglang_afd.protocol.handshake import Gate
from sglang_afd.rounds.prediction import Predictor
from sglang_afd.trace.mlp import MlpTimeline
from sglang_afd.transport.cuda_ipc.driver import CudaError
from sglang_afd.transport.cuda_ipc.hub import CudaIpcHub, HubOptions, check_agreement
from sglang_afd.transport.cuda_ipc.layout import WaitPolicy
from sglang_afd.transport.cuda_ipc.peer_table import PeerTable
from sglang_afd.transport.cuda_ipc.policy import choose_wait_policy
from sglang_afd.transport.cuda_ipc.streams import own_stream
from sglang_afd.transport.cuda_ipc.units import UnitExchange


class DeviceServer:
    """Kernels are compiled and graphs captured before the hub lets anybody in.

    Args:
        config: Ours.
        gate: Who may attach.
        experts: Loaded, on the GPU that is torch's current one.
        listen: Exchange address.
        has_rounds: Else units are real arrivals, first come, first served.

    Raises:
        ConfigError: This model or runner cannot be served so.
    """

    def __init__(
        self, config: AfdConfig, gate: Gate, experts: Experts, listen: str, *, has_rounds: bool
    ) -> None:
        spec = gate.identity.spec
        check_agreement(spec)
        experts.check_device()
        device = torch.cuda.current_device()
        self._experts = experts
        # Without rounds units would wait for rows predicted of other peers; and where
        # roles share a GPU by time slices, a kernel that waits takes a whole slice.
        policy = choose_wait_policy(config.wait_policy)
        self._predicts = has_rounds and policy is WaitPolicy.POLL
        self._layer_ids = spec.moe_layer_ids
        self._stream = own_stream(device)
        max_peers = 2 * config.max_peers
        table = PeerTable(max_peers=max_peers, rank=gate.identity.rank, device=device)
        captured = () if config.is_mlp_cuda_graph_disabled else _captured_rows(config)
        max_rows = max(spec.max_rows, *captured, 0)
        self._buckets = RowBuckets(captured, max_rows)
        with torch.inference_mode(), self._current():
            self._exchange = UnitExchange(
                table,
                hidden_size=spec.hidden_size,
                top_k=spec.top_k,
                dtype=experts.dtype,
                first_expert=gate.identity.first_expert,
                stop_expert=gate.identity.stop_expert,
                layer_ids=spec.moe_layer_ids,
                max_unit_rows=max_rows,
            )
            self._graphs, units = self._prepare()
            # Where roles share a GPU by time slices, even a tiny kernel takes one from the others.
            self._rehearse: Callable[[], object] = (
                capture_nothing().replay if policy is WaitPolicy.POLL else time.monotonic
            )
        self.info = {"units": units}
        self.hub = CudaIpcHub(
            gate,
            HubOptions(
                listen=listen,
                heartbeat_timeout_s=config.heartbeat_timeout_s,
                max_peers=config.max_peers,
                device=device,
                with_rows=False,
            ),
            table=table,
        )
        self.hub.watch_units(self._exchange)

    def run(
        self,
        board: Board,
        order: RankOrder,
        should_stop: Callable[[], bool],
        timeline: MlpTimeline | None,
    ) -> None:
        """Serve until told to stop.

        Raises:
            DeviceFailed: CUDA reported an error.
        """
        loop = DeviceLoop(
            self.hub,
            DeviceUnits(self._exchange, self._experts, self._buckets, self._graphs),
            board,
            order,
            should_stop,
            timeline,
            predictor=Predictor(self._layer_ids, predicts=self._predicts),
            device=DeviceWatch(self._stream, self._exchange.expert_counts, board),
            rehearsal=Rehearsal(self._rehearse),
        )
        _collect_seldom()
        with self._current():
            try:
                loop.run()
            except (RuntimeError, CudaError) as error:
                raise device_failed(error) from error

    def _prepare(self) -> tuple[Graphs, dict[str, Any]]:
        sizes = self._buckets.captured
        warm_up_s = warm_up(self._exchange, self._experts, self._layer_ids, self._buckets)
        graphs: Graphs = {}
        info: dict[str, Any] = {"eager_rows": self._buckets.eager, "warm_up_s": warm_up_s}
        if sizes:
            graphs, report = capture(
                self._exchange, self._experts, self._layer_ids, sizes, warm_up_s=warm_up_s
            )
            info |= asdict(report)
        return graphs, info

    def _current(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)


def _collect_seldom() -> None:
    """Garbage collection of all that was loaded takes milliseconds, in the middle of a step.

    What is there now is looked at no more. What the loop makes has no cycles and goes at once, so
    that looking for some can wait until there is much.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def _captured_rows(config: AfdConfig) -> tuple[int, ...]:
    listed = [int(rows) for rows in config.mlp_cuda_graph_bs.split(",") if rows]
    return graph_rows(listed, config.mlp_cuda_graph_max_bs)
