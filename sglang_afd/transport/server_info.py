"""What an MLP server says of itself over HTTP, for those that want to exchange rows with it."""

from __future__ import annotations

import http.client
import urllib.request

import msgspec

from sglang_afd.errors import PeerLost

TIMEOUT_S = 3.0
MAX_INFO_BYTES = 4 * 1024 * 1024

# NOTE: urllib would go through the proxy that the environment names, which may not reach a server
# of ours; aiohttp does not.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of the group, in rank 0's answer."""

    rank: int
    boot_id: str = ""
    exchange_address: str


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What of `/server_info` matters to whoever exchanges rows; other fields may be there."""

    role: str = ""
    state: str = ""
    ep_rank: int = -1
    group: tuple[Member, ...] | None = None  # rank 0 only
    missing_ranks: tuple[int, ...] = ()


def fetch_info(url: str) -> ServerInfo:
    """`/server_info` of an MLP server.

    Raises:
        PeerLost: Nothing answers there, or not with JSON that fits.
    """
    try:
        with _opener.open(url + "/server_info", timeout=TIMEOUT_S) as response:
            text = response.read(MAX_INFO_BYTES)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PeerLost(f"no MLP server answers at {url}: {error!r}") from None
    try:
        return msgspec.json.decode(text, type=ServerInfo)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PeerLost(f"{url}/server_info is not an MLP server's answer: {error}") from None
