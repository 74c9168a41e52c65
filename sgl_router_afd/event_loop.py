"""The event loop of the router's processes: uvloop where it is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop

__all__ = ["new_event_loop"]
