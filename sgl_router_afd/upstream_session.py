"""The HTTP client towards the attention servers."""

from __future__ import annotations

import os
import socket

import aiohttp

from sgl_router_afd.config import RouterConfig

# SGLang closes idle connections after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE); letting go of them well
# before keeps a request from being written to a connection that is being closed.
IDLE_CONNECTION_S = 2.0
# A host that vanished is noticed after about 10 + 3 * 5 s; a generation itself has no time limit.
KEEPALIVE_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


def open_session(config: RouterConfig) -> aiohttp.ClientSession:
    """A session that adds, decodes and follows nothing, and sets no limit on time or connections.

    aiohttp sets TCP_NODELAY on every connection, on the server side too.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=IDLE_CONNECTION_S, socket_factory=_open_socket
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


async def read_at_most(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body of an answer.

    Raises:
        aiohttp.ClientError: It is longer, or broke off.
    """
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > max_bytes:
            raise aiohttp.ClientPayloadError(f"its answer is longer than {max_bytes} bytes")
    return bytes(body)


def describe(error: Exception) -> str:
    """A client error in words for people; aiohttp's own are long or empty."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"no address of {error.host}: {(error.os_error.strerror or 'unknown').lower()}"
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno).lower()
    return str(error) or type(error).__name__


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    for level, option, value in KEEPALIVE_OPTIONS:
        opened.setsockopt(level, option, value)
    return opened
