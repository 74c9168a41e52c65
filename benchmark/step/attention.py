"""The attention role below the scheduler: its hooks, and what a scheduler says around a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang_afd import cli
from sglang_afd.attn import in_process
from sglang_afd.attn.announcer import Forecast
from sglang_afd.protocol.messages import Kind
from sglang_afd.upstream import server_args as upstream_args


class AttentionRole:
    """Installed once in a process, before its model is loaded."""

    def __init__(self, argv: Sequence[str]) -> None:
        config, rest = cli.parse(argv)
        self.server_args: Any = upstream_args.parse_server_args(rest, config).server_args
        self._runtime = in_process.install(config, self.server_args)

    def wait_attached(self) -> None:
        """Once the model is loaded and its graphs are captured."""
        self._runtime.wait_attached()

    @contextmanager
    def around(self, is_decode: bool, num_rows: int, num_next: int) -> Iterator[None]:
        """One forward, announced as the scheduler does: with the step that will follow."""
        here = self._runtime
        kind = Kind.DECODE if is_decode else Kind.PREFILL
        forecast = Forecast(kind=Kind.DECODE, num_rows=num_next) if num_next else None
        with here.step(here.next_step(), kind):
            here.announce(num_rows)
            here.exchange.finished()  # the step before has been waited for
            here.exchange.launched()
            yield
            here.announce_next(forecast)

    def check(self) -> None:
        """Raise if a step was given up; once the device is idle."""
        self._runtime.exchange.finished()

    def close(self) -> None:
        """Say goodbye to the MLP servers."""
        self._runtime.close()
