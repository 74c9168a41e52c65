"""What an MLP server says of itself over HTTP, for those that want to exchange rows with it."""

from __future__ import annotations

import http.client
import urllib.request
from typing import TypeVar

import msgspec

from sglang_afd.errors import PeerLost

TIMEOUT_S = 3.0
MAX_INFO_BYTES = 4 * 1024 * 1024

_Info = TypeVar("_Info")
# NOTE: urllib would go through the proxy that the environment names, which may not reach a server
# of ours; aiohttp does not.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch_info(url: str, kind: type[_Info]) -> _Info:
    """`/server_info` of an MLP server, as `kind`, which may leave fields out.

    Raises:
        PeerLost: Nothing answers there, or not with JSON that fits.
    """
    try:
        with _opener.open(url + "/server_info", timeout=TIMEOUT_S) as response:
            text = response.read(MAX_INFO_BYTES)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PeerLost(f"no MLP server answers at {url}: {error!r}") from None
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PeerLost(f"{url}/server_info is not an MLP server's answer: {error}") from None
