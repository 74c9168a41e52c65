"""What rings at an MLP rank becomes an arrival, once it is known to be possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_afd.errors import ProtocolError
from sglang_afd.protocol.messages import Dispatch
from sglang_afd.transport.base import Arrived, Event, Exchange, PeerAttached, Rows
from sglang_afd.transport.cuda_ipc.doorbells import Doorbells


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenPeer:
    """An attention server whose slots are mapped."""

    index: int  # in the table
    event: PeerAttached
    num_slots: int
    doorbells: Doorbells


class Listener:
    """Checks headers, which another process wrote.

    Args:
        layer_ids: The MoE layers.
        max_rows: Of one exchange.
        rows_of: What an arrival shows.
    """

    def __init__(
        self,
        layer_ids: Sequence[int],
        max_rows: int,
        rows_of: Callable[[OpenPeer, Dispatch], Rows],
    ) -> None:
        self._layer_ids = frozenset(layer_ids)
        self._max_rows = max_rows
        self._rows_of = rows_of

    def arrivals(self, found: OpenPeer, headers: Sequence[Dispatch]) -> list[Event]:
        """Of one peer.

        Raises:
            ProtocolError: There is no such exchange.
        """
        arrivals: list[Event] = []
        for header in headers:
            # NOTE: doorbells are the server's, not the session's; a later one rings them, too.
            if header.epoch == found.event.epoch:
                self._check(found, header)
                rows = self._rows_of(found, header)
                exchange = Exchange(peer=found.event.peer, header=header, rows=rows)
                arrivals.append(Arrived(exchange=exchange))
        return arrivals

    def _check(self, found: OpenPeer, header: Dispatch) -> None:
        if (
            header.layer_id not in self._layer_ids
            or not 1 <= header.num_rows <= self._max_rows
            or not 0 <= header.micro_batch_id < found.num_slots
        ):
            raise ProtocolError(f"a doorbell tells of an exchange that cannot be: {header}")
