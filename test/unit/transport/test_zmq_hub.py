from __future__ import annotations

from pathlib import Path

import zmq
from peers import make_gate

from sglang_afd.transport.zmq_hub import ZmqHub


def test_a_message_whose_connection_is_gone_is_dropped(tmp_path: Path) -> None:
    hub = ZmqHub(make_gate(), f"ipc://{tmp_path}/exchange", heartbeat_timeout_s=1.0)
    try:
        # A frame that came from no socket has no descriptor either.
        assert hub._receive([zmq.Frame(b"peer"), zmq.Frame(b"random")]) == []
    finally:
        hub.close()
