"""SGLang's HTTP server: its launcher and its application."""

from __future__ import annotations

from sglang.srt.entrypoints.http_server import _execute_server_warmup, app, launch_server
from sglang.srt.utils import kill_process_tree

execute_server_warmup = _execute_server_warmup

__all__ = ["app", "execute_server_warmup", "kill_process_tree", "launch_server"]
