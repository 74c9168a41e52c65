"""What of the settings is allowed, and hardly what somebody wants (pure)."""

from __future__ import annotations

from sgl_router_afd.config import RouterConfig
from sglang_afd.protocol.auth import is_loopback


def surprises(config: RouterConfig) -> list[str]:
    """What will happen, and what to do, for the log."""
    found = []
    if not config.afd_secret and not is_loopback(config.host):
        found.append(
            f"no server can register with this router, for it listens on {config.host} and has no "
            "secret; give it and its servers the same --afd-secret-file"
        )
    if (config.attn_urls or config.mlp_urls) and config.status_interval_s >= config.lease_s:
        found.append(
            f"servers of --attn and --mlp are late between any two polls, for --status-interval-s "
            f"is {config.status_interval_s:g} and --lease-s {config.lease_s:g}; give a longer "
            "lease, or poll more often"
        )
    return found
