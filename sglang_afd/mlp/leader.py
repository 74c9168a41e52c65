"""Where the rank 0 that a rank reports to exchanges rows, for ranks that follow it."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from sglang_afd.errors import PeerLost
from sglang_afd.transport.addresses import replace_wildcard

TIMEOUT_S = 3.0
MAX_INFO_BYTES = 4 * 1024 * 1024


class _Member(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    boot_id: str
    exchange_address: str


class _Info(msgspec.Struct, frozen=True, kw_only=True):
    group: tuple[_Member, ...] = ()


def find_leader(urls: Sequence[str], boot_id: str) -> str:
    """The exchange address of the rank 0 whose group has this rank.

    Args:
        urls: Where rank 0 may be, in order.
        boot_id: Of this rank. Of two groups it is a member of the one that accepted its report.

    Raises:
        PeerLost: No group at these addresses has it.
    """
    failures = []
    for url in urls:
        try:
            group = {member.rank: member for member in _fetch(url).group}
        except PeerLost as error:
            failures.append(str(error))
            continue
        if 0 in group and any(member.boot_id == boot_id for member in group.values()):
            return replace_wildcard(group[0].exchange_address, urlsplit(url).hostname or "")
        failures.append(f"{url} does not serve as rank 0 of a group with this rank yet")
    raise PeerLost("; ".join(failures))


def _fetch(url: str) -> _Info:
    try:
        with urllib.request.urlopen(url + "/server_info", timeout=TIMEOUT_S) as response:
            return msgspec.json.decode(response.read(MAX_INFO_BYTES), type=_Info)
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise PeerLost(f"{url} does not answer as an MLP server: {error!r}") from None
