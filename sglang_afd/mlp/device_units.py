"""Launches expert runs on the GPU: a graph where one was captured, else the same calls eagerly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from torch import Tensor

from sglang_afd.mlp.row_buckets import RowBuckets
from sglang_afd.transport.base import Rows
from sglang_afd.transport.cuda_ipc.unit_ring import UnitMemberRef


class RunsOnDevice(Protocol):
    """What is needed of `Experts`."""

    def run_on_device(self, layer_id: int, rows: Rows) -> Tensor:
        """This rank's share of one layer's expert sum, [T, H]; only launches kernels."""


class Exchanges(Protocol):
    """What is needed of `UnitExchange`."""

    def submit(
        self,
        layer_id: int,
        members: Sequence[UnitMemberRef],
        *,
        first_row: int = 0,
        num_rows: int | None = None,
        is_last_piece: bool = True,
    ) -> int:
        """Describe the unit that is launched next; its ticket."""

    def pull(self, bucket: int) -> Rows:
        """Wait for the members' rows and gather them."""

    def push(self, partial: Tensor, bucket: int) -> None:
        """Send the members their rows of the sums."""

    @property
    def num_done(self) -> int:
        """Units whose replies have left."""


class Replays(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Launch it."""


class Launch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A unit, or a part of one, that fits the staging buffers."""

    layer_id: int
    members: Sequence[UnitMemberRef]
    num_rows: int
    first_row: int = 0  # where a piece of prefill begins
    is_piece: bool = False
    is_last_piece: bool = True


class DeviceUnits:
    """One rank's expert runs, in the order of their tickets.

    Args:
        exchange: Gathers rows and sends sums.
        experts: Run between the two.
        buckets: Numbers of rows that kernels have been compiled for.
        graphs: By layer and bucket; whatever is not there runs eagerly.
    """

    def __init__(
        self,
        exchange: Exchanges,
        experts: RunsOnDevice,
        buckets: RowBuckets,
        graphs: Mapping[tuple[int, int], Replays] | None = None,
    ) -> None:
        self.exchange = exchange
        self.buckets = buckets
        self._experts = experts
        self._graphs = graphs or {}
        self.last_ticket = 0

    def launch(self, unit: Launch) -> bool:
        """Enqueue one unit on the current stream; returns whether a graph was replayed."""
        bucket = self.buckets.fit(unit.num_rows)
        self.last_ticket = self.exchange.submit(
            unit.layer_id,
            unit.members,
            first_row=unit.first_row,
            num_rows=unit.num_rows if unit.is_piece else None,
            is_last_piece=unit.is_last_piece,
        )
        graph = self._graphs.get((unit.layer_id, bucket))
        if graph is not None:
            graph.replay()
            return True
        rows = self.exchange.pull(bucket)
        self.exchange.push(self._experts.run_on_device(unit.layer_id, rows), bucket)
        return False

    @property
    def num_in_flight(self) -> int:
        """Units that were launched and have not replied."""
        return self.last_ticket - self.exchange.num_done
