"""python -m sgl_router_afd.gateway.process: smg in a process that ends with the router."""

from __future__ import annotations

import sys

import msgspec
from smg.launch_router import parse_router_args
from smg.router import Router

from sglang_afd.process import die_with_parent


def main() -> None:
    """Relay until SIGTERM. The flags come on standard input, where no other user sees keys."""
    die_with_parent()
    flags = msgspec.json.decode(sys.stdin.buffer.read(), type=list[str])
    Router.from_args(parse_router_args(flags)).start()


if __name__ == "__main__":
    main()
