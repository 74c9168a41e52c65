"""Puts a sleep in front of every exchange and of every expert run of this process.

The attention part of a layer ends where its rows are sent, so that is where its delay goes: into
the thread, and with several micro-batches into the greenlet, that computes the attention. One
fault can be planted, to show that the counters notice it: every tenth expert run is not delayed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from overlap.delays import ENV, DelayFile, Word
from sglang_afd.attn.host_exchange import HostExchange
from sglang_afd.mlp.experts import Experts
from sglang_afd.protocol.messages import Dispatch, Kind
from sglang_afd.transport.zmq_link import ZmqLink

FAULT_ENV = "BENCH_OVERLAP_SKIP"  # "1" plants the fault
SKIPPED = 10


class _Delays:
    """The file of this process, opened at the first call: it is forked after planting."""

    def __init__(self) -> None:
        self._file: DelayFile | None = None
        self._last_step = -1
        self._runs = 0

    def file(self) -> DelayFile:
        if self._file is None:
            self._file = DelayFile(Path(os.environ[ENV]))
        return self._file

    def before_exchange(self, header: Dispatch) -> None:
        file = self.file()
        if header.kind is Kind.DECODE:
            file.add(Word.DECODE_STEPS, header.step != self._last_step)
            file.add(Word.DECODE_CALLS, 1)
            file.add(Word.DECODE_ROWS, header.num_rows)
        self._last_step = header.step

    def before_send(self, num_rows: int) -> None:
        self.file().sleep(num_rows)

    def before_run(self, num_rows: int) -> None:
        self._runs += 1
        if os.environ.get(FAULT_ENV) == "1" and self._runs % SKIPPED == 0:
            return
        self.file().sleep(num_rows)


def plant() -> None:
    """Patch both roles; which one a process takes is decided later."""
    delays = _Delays()
    send, dispatch, run = HostExchange.send, ZmqLink.dispatch, Experts.run

    # Before `send`, so that a timeline shows the delay as attention.
    def send_late(
        self: HostExchange, layer_id: int, micro_batch: Any, rows: Any, **piece: Any
    ) -> None:
        delays.before_send(rows.hidden_states.shape[0])
        send(self, layer_id, micro_batch, rows, **piece)

    def dispatch_counted(self: ZmqLink, header: Dispatch, rows: Any) -> None:
        delays.before_exchange(header)
        dispatch(self, header, rows)

    def run_late(self: Experts, layer_id: int, rows: Any) -> Any:
        delays.before_run(rows.hidden_states.shape[0])
        return run(self, layer_id, rows)

    HostExchange.send = send_late  # type: ignore[method-assign]
    ZmqLink.dispatch = dispatch_counted  # type: ignore[method-assign]
    Experts.run = run_late  # type: ignore[method-assign]
