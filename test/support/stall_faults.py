"""Faults around lost peers and leaping clocks; see faults.py."""

from __future__ import annotations

import os
from typing import Any


def publish_another_address() -> None:
    """The MLP server listens where it was told, and says that it listens somewhere else."""
    from sglang_afd.transport.zmq_hub import ZmqHub

    init = ZmqHub.__init__

    def init_and_pretend(self: ZmqHub, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.address = os.environ["TEST_PUBLISHED_ADDRESS"]

    ZmqHub.__init__ = init_and_pretend  # type: ignore[method-assign]


def send_zeros_again() -> None:
    """What is dispatched again after a loss has lost its rows."""
    from dataclasses import replace

    from sglang_afd.attn.host_exchange import HostExchange

    send_pending = HostExchange._send_pending

    def send_zeros(self: HostExchange, waiting_since_s: float) -> None:
        if self._link is not None:  # it was lost in the middle of a step
            for micro_batch_id, pending in self._pending.items():
                zeros = replace(
                    pending.rows, hidden_states=pending.rows.hidden_states.clone().zero_()
                )
                self._pending[micro_batch_id] = replace(pending, rows=zeros)
        send_pending(self, waiting_since_s)

    HostExchange._send_pending = send_zeros  # type: ignore[method-assign]


def change_a_token() -> None:
    """A request that is retracted goes on after another token than the one that its client has."""
    from sglang.srt.managers.schedule_batch import Req

    reset_for_retract = Req.reset_for_retract

    def reset_and_change(self: Req) -> None:
        reset_for_retract(self)
        if self.output_ids:
            self.output_ids[-1] = (self.output_ids[-1] + 1) % 256

    Req.reset_for_retract = reset_and_change  # type: ignore[method-assign]


def hold_while_told() -> None:
    """Held requests are held for an hour while a certain file exists."""
    import time

    from sglang_afd.attn.attach import Attacher

    hold, path = Attacher.hold, os.environ["TEST_HOLD_FILE"]

    def hold_for_long(self: Attacher[Any]) -> None:
        hold(self)
        with self._lock:
            if os.path.exists(path) and not self._is_attached():
                self._board.update(held_until_s=time.monotonic() + 3600)

    Attacher.hold = hold_for_long  # type: ignore[method-assign]


def experts_raise() -> None:
    """The experts cannot run on more than a few rows."""
    from sglang_afd.mlp.experts import Experts

    run = Experts.run

    def run_or_raise(self: Experts, layer_id: int, rows: Any) -> Any:
        if rows.hidden_states.shape[0] > 8:
            raise RuntimeError("planted: out of memory")
        return run(self, layer_id, rows)

    Experts.run = run_or_raise  # type: ignore[method-assign]


def leap_in_time() -> None:
    """Every clock that Python code asks goes 12 hours ahead once a certain file exists."""
    import time

    path, leap_s = os.environ["TEST_LEAP_FILE"], 12 * 3600
    for name in ("monotonic", "time", "perf_counter"):
        setattr(time, name, _leaping(getattr(time, name), path, leap_s))
        setattr(time, f"{name}_ns", _leaping(getattr(time, f"{name}_ns"), path, leap_s * 10**9))


def _leaping(clock: Any, path: str, leap: Any) -> Any:
    return lambda: clock() + (leap if os.path.exists(path) else 0)


FAULTS = {
    "publish_another_address": publish_another_address,
    "send_zeros_again": send_zeros_again,
    "change_a_token": change_a_token,
    "experts_raise": experts_raise,
    "hold_while_told": hold_while_told,
    "leap_in_time": leap_in_time,
}
