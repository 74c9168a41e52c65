"""Socket options that both ends share."""

from __future__ import annotations

import zmq

from sglang_afd.protocol.codec import MAX_CONTROL_BYTES
from sglang_afd.protocol.messages import ModelSpec
from sglang_afd.transport.sessions import WIRE_DTYPES


def configure(
    socket: zmq.Socket[bytes], address: str, spec: ModelSpec, heartbeat_timeout_s: float
) -> None:
    """Bound frame sizes and let the I/O thread find a silent peer.

    Args:
        socket: Not yet bound or connected.
        address: What it will be bound or connected to; brackets mean IPv6.
        spec: Fixes the largest frame, that of `max_rows` rows.
        heartbeat_timeout_s: A peer silent for longer is disconnected, however busy its loop is:
            heartbeats are answered by ZeroMQ's I/O thread.
    """
    itemsize = WIRE_DTYPES[spec.dtype].itemsize
    largest = spec.max_rows * (spec.hidden_size * itemsize + spec.top_k * 8)
    timeout_ms = max(1, round(heartbeat_timeout_s * 1000))
    socket.setsockopt(zmq.MAXMSGSIZE, max(MAX_CONTROL_BYTES, largest))
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, timeout_ms // 4))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int("[" in address))
