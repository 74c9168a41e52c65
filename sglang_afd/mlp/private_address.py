"""The default exchange address: a socket in a directory that only this user can enter."""

from __future__ import annotations

from sglang_afd.transport.private_path import private_path


def private_ipc_address() -> str:
    """`ipc://` in a new directory of mode 0700, which is removed when this process ends."""
    return f"ipc://{private_path('exchange')}"
