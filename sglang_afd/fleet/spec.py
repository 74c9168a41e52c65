"""What a fleet has to know about one server."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """One server: how to start it and how to ask whether it is ready."""

    name: str  # "attn-0": prefix of its output, unique in the fleet
    argv: tuple[str, ...]  # program and flags
    status_url: str  # see probe.py for what counts as ready
    stop_signal: signal.Signals = signal.SIGTERM
    stop_stage: int = 0  # servers of a lower stage are stopped first: those that use the others
    environment: Mapping[str, str] = field(default_factory=dict)  # besides the launcher's own
    has_spares: bool = False  # another takes its place when it ends, while there are spares
