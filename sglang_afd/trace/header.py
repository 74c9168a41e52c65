"""The first event of every timeline: whose it is, and on which clock its times are."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Annotated

import msgspec

HEADER_EVENT = "afd_header"
FORMAT = 1


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in the file are microseconds since `clock_ns` of the host's monotonic clock."""

    format: int = FORMAT
    role: str  # "attn" or "mlp"
    server_id: str  # unique among the servers of a run
    rank: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0  # mlp: of the group
    hostname: str  # for people
    boot_id: str  # of the host; two servers with the same one share a clock
    clock_ns: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    wall_clock_s: float  # time.time() at clock_ns, for people


def header_of_this_process(role: str, server_id: str, rank: int = 0) -> Header:
    """Of a recording that begins now."""
    return Header(
        role=role,
        server_id=server_id,
        rank=rank,
        hostname=socket.gethostname(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        clock_ns=time.monotonic_ns(),
        wall_clock_s=time.time(),
    )
