"""What the router's flags are in smg's words, and which of them smg has no words for (pure)."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from sgl_router_afd.config import DEFAULTS, RouterConfig
from sgl_router_afd.flags import flag_of
from sglang_afd.errors import ConfigError

PREFIX_CHARS_OF_TOKEN = 4  # smg hashes so many characters for each token that it was told to hash
# The beginning that our policy `prefix` looks at is 256 bytes long, and its slack is the same.
PREFIX_HASH = (
    *("prefix_hash", "--prefix-token-count", str(256 // PREFIX_CHARS_OF_TOKEN)),
    *("--prefix-hash-load-factor", "1.25", "--prefix-hash-balance-abs-threshold", "4"),
)
POLICIES: Mapping[str, tuple[str, ...]] = {
    "least_load": ("least_load",),
    "prefix": PREFIX_HASH,
    "round_robin": ("round_robin",),
    # By requests: smg's own default waits for loads that it polls every ten seconds.
    "power_of_two": ("power_of_two", "--power-of-two-load-metric", "least_requests"),
}
# At its level `info` smg logs a dozen lines for each server that comes.
LOG_LEVELS = {"debug": "debug", "info": "warn", "warning": "warn", "error": "error"}
NOT_THERE = {
    "relay_processes": "smg is one process with threads of its own",
    "hold_timeout_s": "smg answers 503 or 404 at once while nobody serves",
    "max_headers": "smg has no such limit",
    "max_header_bytes": "smg has no such limit",
}
REREAD_S = 1  # smg notices a new manifest by itself; this is for the change that it missed
# Flags of smg that this router sets; `--smg-args` may not.
OURS = (
    *("--host", "--port", "--worker-urls", "--policy", "--api-key"),
    *("--service-discovery", "--discovery-provider", "--discovery-file", "--prometheus-port"),
    *("--prometheus-host", "--shutdown-grace-period-secs", "--pd-disaggregation", "--dp-aware"),
    *("--epd-disaggregation", "--disable-health-check", "--disable-circuit-breaker"),
)


def check(config: RouterConfig) -> None:
    """Refuse what smg cannot do.

    Raises:
        ConfigError: Names the flag, and why it has no effect there.
    """
    given = vars(config)
    for field, why in NOT_THERE.items():
        if given[field] != DEFAULTS[field]:
            raise ConfigError(
                f"{flag_of(field)} has no effect with --data-plane smg: {why}; leave it out"
            )
    if config.retry_budget not in (0, DEFAULTS["retry_budget"]):
        raise ConfigError(
            "--retry-budget has no effect with --data-plane smg but for 0, which sends nothing "
            "again: smg sends each request up to five times; leave it out, or see smg's --retry-* "
            "flags for --smg-args"
        )
    for word in extra_flags(config):
        name = word.partition("=")[0]
        if name in OURS:
            raise ConfigError(f"--smg-args got {name}, which this router sets itself; leave it out")


def extra_flags(config: RouterConfig) -> list[str]:
    """Those of --smg-args.

    Raises:
        ConfigError: It has a quotation mark without its other half.
    """
    try:
        return shlex.split(config.smg_args)
    except ValueError as error:
        # They are not shown, nor is the cause chained: keys may be among them.
        raise ConfigError(
            f"--smg-args has flags that no shell could read: {error}; quote them anew"
        ) from None


def scheme(config: RouterConfig) -> str:
    """How smg is spoken to."""
    has_tls = any(word.startswith("--tls-cert-path") for word in extra_flags(config))
    return "https" if has_tls else "http"


def flags(
    config: RouterConfig, *, host: str, port: int, metrics_port: int, manifest: Path, own_key: str
) -> tuple[str, ...]:
    """The command line of smg.

    Args:
        config: The router's settings.
        host: An address, since smg takes no names.
        port: For clients.
        metrics_port: For this router alone.
        manifest: See `manifest`.
        own_key: What smg's own API needs, so that nobody adds a server there but through us.
    """
    given = {
        "--host": host,
        "--port": str(port),
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": str(metrics_port),
        "--discovery-provider": "file",
        "--discovery-file": str(manifest),
        "--discovery-check-interval-secs": str(REREAD_S),
        "--shutdown-grace-period-secs": _seconds(config.shutdown_timeout_s),
        "--control-plane-api-keys": f"router:router:admin:{own_key}",
    }
    if config.api_key:
        given["--api-key"] = config.api_key.value.decode()
    return (
        *_limits(config),
        *extra_flags(config),
        # A request that names no model is refused: without this it would go to any of several.
        "--enable-igw",
        # Who is well is decided here; two judges would disagree.
        *("--disable-health-check", "--disable-circuit-breaker", "--no-remove-unhealthy-workers"),
        *("--policy", *POLICIES[config.policy]),
        *(f"{name}={value}" for name, value in given.items()),
    )


def _limits(config: RouterConfig) -> tuple[str, ...]:
    """Those that --smg-args may change."""
    limits = {
        "--log-level": LOG_LEVELS[config.log_level],
        "--max-concurrent-requests": str(config.max_concurrent_requests),
        "--queue-size": str(config.queue_size),
        "--queue-timeout-secs": _seconds(config.queue_timeout_s),
        "--header-read-timeout-secs": _seconds(config.header_timeout_s),
        "--idle-connection-timeout-secs": _seconds(config.keep_alive_timeout_s),
        "--stream-body-stall-timeout-secs": _seconds(config.body_timeout_s),
        "--max-payload-size": str(config.max_body_bytes),
        "--max-buffered-request-bytes": str(config.max_replay_body_bytes),
    }
    retries = () if config.retry_budget else ("--disable-retries",)
    return (*(f"{name}={value}" for name, value in limits.items()), *retries)


def _seconds(time_s: float) -> str:
    """Whole ones, and at least one: to smg 0 means without a limit."""
    return str(max(1, math.ceil(time_s)))
