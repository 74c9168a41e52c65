"""One message to a router over HTTP, and its answer."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from sglang_afd.errors import PeerLost, ProtocolError
from sglang_afd.protocol.paths import SERVERS_PATH
from sglang_afd.protocol.registration import (
    MAX_MESSAGE_BYTES,
    FromRouter,
    ToRouter,
    decode_from_router,
    encode,
)
from sglang_afd.protocol.signature import SIGNATURE_HEADER, sign

TIMEOUT_S = 3.0
_MAX_SHOWN = 300  # characters of an answer that is none of ours


def post(url: str, message: ToRouter, secret: bytes) -> FromRouter | None:
    """Send one message to one router.

    Returns: Its answer; None to a goodbye.

    Raises:
        PeerLost: Nothing answers there.
        ProtocolError: Something answers that is no router, or one that refuses the message.
    """
    body = encode(message)
    headers = {"Content-Type": "application/json"}
    if secret:
        headers[SIGNATURE_HEADER] = sign(secret, body)
    parts = urlsplit(url)
    # NOTE: urllib would go through the proxy that the environment names, which may not reach it.
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", parts.path + SERVERS_PATH, body=body, headers=headers)
        response = connection.getresponse()
        status, text = response.status, response.read(MAX_MESSAGE_BYTES + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PeerLost(f"no router answers at {url}: {error!r}") from None
    finally:
        connection.close()
    if status == 204:
        return None
    if status in (200, 409):
        try:
            return decode_from_router(text)
        except ProtocolError as error:
            raise ProtocolError(f"{url}{SERVERS_PATH}: {error}") from None
    shown = text[:_MAX_SHOWN].decode(errors="replace")
    raise ProtocolError(f"{url}{SERVERS_PATH} answers {status}: {shown}")
