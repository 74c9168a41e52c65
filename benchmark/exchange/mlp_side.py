"""The MLP process: units of one layer each, without experts; rows come and go back as they are."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import torch

from exchange.channel import TIMEOUT_S, Channel
from exchange.stamps import Stamps
from sglang_afd.transport.cuda_ipc.layout import SlabShape
from sglang_afd.transport.cuda_ipc.peer_table import PeerTable
from sglang_afd.transport.cuda_ipc.unit_ring import RING_UNITS, UnitMemberRef
from sglang_afd.transport.cuda_ipc.units import UnitExchange

NUM_EXPERTS = 128


class MlpSide:
    """Serves one slab after the other; a whole step's units are one CUDA graph."""

    def __init__(self, channel: Channel, num_layers: int) -> None:
        self._channel = channel
        self._num_layers = num_layers
        self._table = PeerTable(max_peers=8, rank=0, device=0)
        self._stream = torch.cuda.Stream()
        self._units: dict[tuple[int, int, str], UnitExchange] = {}
        self._exchange: UnitExchange | None = None
        self._index = -1

    def run(self) -> None:
        """Do what the other side says until it says stop."""
        while True:
            message, descriptors = self._channel.hear()
            match message.pop("do"):
                case "open":
                    self._open(message, descriptors)
                case "serve":
                    self._serve(**message)
                case "close":
                    self._stream.synchronize()
                    self._table.mark_dead(self._index)
                    self._table.close(self._index)
                    self._channel.say({})
                case "stop":
                    return

    def _open(self, message: dict[str, Any], descriptors: tuple[int, ...]) -> None:
        shape = SlabShape(**message["shape"])
        self._index = self._table.open((descriptors[0], descriptors[1]), shape, message["epoch"])
        for descriptor in descriptors:
            os.close(descriptor)
        key = (shape.hidden_size, shape.max_rows, shape.dtype)
        if key not in self._units:
            self._units[key] = UnitExchange(
                self._table,
                hidden_size=shape.hidden_size,
                top_k=shape.top_k,
                dtype=getattr(torch, shape.dtype),
                first_expert=0,
                stop_expert=NUM_EXPERTS,
                layer_ids=range(self._num_layers),
                max_unit_rows=shape.max_rows,
            )
        self._exchange = self._units[key]
        self._channel.say({})
        self._serve_first()

    def _serve_first(self) -> None:
        """One exchange of one row by its doorbell, from which on the rows are foreseen."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (headers := self._table.rung(self._index)):
            if time.monotonic() > deadline_s:
                raise TimeoutError("no doorbell rang")
        with torch.cuda.stream(self._stream):
            self._submit(headers[0].layer_id, headers[0].num_rows)
            self._unit(headers[0].num_rows)
        self._stream.synchronize()

    def _serve(self, num_rows: int, num_steps: int, has_stamps: bool) -> None:
        """Steps whose graphs are enqueued ahead of their rows."""
        assert self._exchange is not None
        stamps = Stamps(self._num_layers)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for layer in range(self._num_layers):
                self._unit(num_rows, stamps if has_stamps else None, layer)
        self._channel.say({})
        with torch.cuda.stream(self._stream):
            for _ in range(num_steps):
                for layer in range(self._num_layers):
                    self._submit(layer, num_rows)
                graph.replay()
        self._stream.synchronize()
        answer = {"error": self._exchange.error, "stamps": stamps.read() if has_stamps else []}
        self._channel.say(answer)

    def _submit(self, layer: int, num_rows: int) -> None:
        exchange = self._exchange
        assert exchange is not None
        while exchange.num_submitted - exchange.num_done >= RING_UNITS:
            pass
        exchange.submit(layer, [UnitMemberRef(peer_index=self._index, slot=0, num_rows=num_rows)])

    def _unit(self, num_rows: int, stamps: Stamps | None = None, layer: int = 0) -> None:
        assert self._exchange is not None
        rows = self._exchange.pull(num_rows)
        if stamps is not None:
            stamps.put(layer)
        self._exchange.push(rows.hidden_states, num_rows)


def main(descriptor: int, num_layers: int) -> int:
    """What the child process runs."""
    torch.cuda.set_device(0)
    with socket.socket(fileno=descriptor) as connection:
        MlpSide(Channel(connection), num_layers).run()
    return 0
