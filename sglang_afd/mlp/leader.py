"""Where the rank 0 that a rank reports to exchanges rows, for ranks that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from sglang_afd.errors import PeerLost
from sglang_afd.transport.addresses import replace_wildcard
from sglang_afd.transport.server_info import fetch_info


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
            group = {member.rank: member for member in fetch_info(url).group or ()}
        except PeerLost as error:
            failures.append(str(error))
            continue
        if 0 in group and any(member.boot_id == boot_id for member in group.values()):
            return replace_wildcard(group[0].exchange_address, urlsplit(url).hostname or "")
        failures.append(f"{url} does not serve as rank 0 of a group with this rank yet")
    raise PeerLost("; ".join(failures) or "the router has not said where rank 0 is")
