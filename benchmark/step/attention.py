"""The attention role below the scheduler: its hooks and its attachment around single steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang_afd import cli
from sglang_afd.attn import runtime
from sglang_afd.attn.announcer import Forecast
from sglang_afd.attn.runtime import Runtime
from sglang_afd.attn.scheduler import build_hooks
from sglang_afd.attn.status import StatusBoard
from sglang_afd.protocol.messages import Kind
from sglang_afd.upstream import hooks
from sglang_afd.upstream import server_args as upstream_args


class AttentionRole:
    """Installed once in a process, before its model is loaded."""

    def __init__(self, argv: Sequence[str]) -> None:
        config, rest = cli.parse(argv)
        self.server_args: Any = upstream_args.parse_server_args(rest, config).server_args
        self._runtime = Runtime(config, self.server_args, StatusBoard())
        runtime.install(self._runtime)
        hooks.install(build_hooks())
        self._number = 0

    def wait_attached(self) -> None:
        """Once the model is loaded."""
        self._runtime.wait_attached()

    @contextmanager
    def around(self, is_decode: bool, num_rows: int, num_next: int) -> Iterator[None]:
        """One forward, announced as the scheduler does."""
        self._number += 1
        kind = Kind.DECODE if is_decode else Kind.PREFILL
        forecast = Forecast(kind=Kind.DECODE, num_rows=num_next) if num_next else None
        with self._runtime.step(self._number, kind):
            self._runtime.announce(num_rows)
            yield
            self._runtime.announce_next(forecast)

    def close(self) -> None:
        """Say goodbye to the MLP servers."""
        self._runtime.close()
