"""Ctrl-C and its relatives: the first asks for an orderly stop, the second for an immediate one."""

from __future__ import annotations

import asyncio
import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Takes over the signals of the running event loop's process."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.kill = asyncio.Event()
        self.exit_code = 0
        for signal_number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(
                signal_number, self._on_signal, signal_number
            )

    def _on_signal(self, signal_number: signal.Signals) -> None:
        if self.stop.is_set():
            self.kill.set()
            return
        self.exit_code = 128 + signal_number
        self.stop.set()
