"""The router's settings: checked once, here, before anything is started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from yarl import URL

from sgl_router_afd.endpoints import OWN, RELAYED, STATUS
from sgl_router_afd.policy import POLICIES
from sglang_afd.errors import ConfigError

MAX_RELAYS_UNASKED = 4
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """What `python -m sgl_router_afd.launch_router` was asked to do.

    Raises: ConfigError, naming the flag, the value it got and the values it takes.
    """

    attn_urls: tuple[str, ...]  # http(s)://host:port of each attention server; at least one
    policy: str = "least_load"  # a key of `policy.POLICIES`
    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0 for every interface
    port: int = 30000  # 0..65535; 0 takes a free one, which the log names
    status_interval_s: float = 0.5  # seconds between two polls of a server; 0.01..60
    status_timeout_s: float = 2.0  # seconds one poll may take; 0.01..60
    max_missed_polls: int = 3  # polls in a row that a ready server may leave unanswered; 1..100
    connect_timeout_s: float = 5.0  # seconds to open a connection to a server; 0.01..300
    shutdown_timeout_s: float = 30.0  # seconds that running requests get after SIGTERM; 0..86400
    relay_processes: int = 0  # processes that relay; 0..64, see `num_relays`
    hold_timeout_s: float = 10.0  # seconds that a request waits for a ready server; 0..86400
    retry_budget: float = 0.2  # requests sent again for each request that comes; 0..1
    max_concurrent_requests: int = 16384  # requests let in at once; 1..2**20
    queue_size: int = 4096  # requests that wait to be let in; 0..2**20
    queue_timeout_s: float = 30.0  # seconds that one may wait; 0..86400
    header_timeout_s: float = 15.0  # seconds from a header's first byte to its last; 0.1..3600
    body_timeout_s: float = 60.0  # seconds between two pieces of a body; 0.1..3600
    keep_alive_timeout_s: float = 75.0  # seconds that an idle connection stays; 0.1..86400
    max_headers: int = 128  # fields of one header; 1..10000
    max_header_bytes: int = 64 * 1024  # bytes of one request's header; 256..2**20
    max_replay_body_bytes: int = 1024 * 1024  # bytes of a body that is kept; 0..2**30
    max_body_bytes: int = 256 * 1024 * 1024  # bytes of one request body; 1..2**40
    log_level: str = "info"  # one of LOG_LEVELS

    def __post_init__(self) -> None:
        if not self.attn_urls:
            raise ConfigError("--attn names no server; give the URL of at least one")
        urls = tuple(_checked_url(url) for url in self.attn_urls)
        for url in urls:
            if urls.count(url) > 1:
                raise ConfigError(f"--attn names {url} twice; give each attention server once")
        object.__setattr__(self, "attn_urls", urls)
        _check_choice("--policy", self.policy, tuple(POLICIES))
        _check_choice("--log-level", self.log_level, LOG_LEVELS)
        _check_range("--port", self.port, 0, 65535)
        _check_range("--status-interval-s", self.status_interval_s, 0.01, 60)
        _check_range("--status-timeout-s", self.status_timeout_s, 0.01, 60)
        _check_range("--max-missed-polls", self.max_missed_polls, 1, 100)
        _check_range("--connect-timeout-s", self.connect_timeout_s, 0.01, 300)
        _check_range("--shutdown-timeout-s", self.shutdown_timeout_s, 0, 86400)
        _check_range("--relay-processes", self.relay_processes, 0, 64)
        _check_range("--hold-timeout-s", self.hold_timeout_s, 0, 86400)
        _check_range("--retry-budget", self.retry_budget, 0, 1)
        _check_range("--max-concurrent-requests", self.max_concurrent_requests, 1, 2**20)
        _check_range("--queue-size", self.queue_size, 0, 2**20)
        _check_range("--queue-timeout-s", self.queue_timeout_s, 0, 86400)
        _check_range("--header-timeout-s", self.header_timeout_s, 0.1, 3600)
        _check_range("--body-timeout-s", self.body_timeout_s, 0.1, 3600)
        _check_range("--keep-alive-timeout-s", self.keep_alive_timeout_s, 0.1, 86400)
        _check_range("--max-headers", self.max_headers, 1, 10000)
        _check_range("--max-header-bytes", self.max_header_bytes, 256, 2**20)
        _check_range("--max-replay-body-bytes", self.max_replay_body_bytes, 0, 2**30)
        _check_range("--max-body-bytes", self.max_body_bytes, 1, 2**40)

    @property
    def num_relays(self) -> int:
        """Processes that relay; unless told otherwise one for each core, up to 4."""
        return self.relay_processes or min(MAX_RELAYS_UNASKED, len(os.sched_getaffinity(0)))


DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(RouterConfig) if field.default is not MISSING
}


def parse_args(argv: Sequence[str] | None = None) -> RouterConfig:
    """Read the command line; a mistake prints one error and exits with code 2.

    Args:
        argv: The arguments without the program's name; None takes those of the process.
    """
    parser = _build_parser()
    args = vars(parser.parse_args(argv))
    try:
        return RouterConfig(attn_urls=tuple(args.pop("attn")), **args)
    except ConfigError as error:
        parser.error(str(error))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_router_afd.launch_router",
        allow_abbrev=False,
        description="Relay OpenAI and SGLang requests to sglang-afd attention servers. Servers may "
        "be started before or after the router: it polls each one's /afd/v1/status and sends "
        "traffic only to those that are ready.",
        epilog=f"Own endpoints: {' '.join(OWN)}. Relayed byte for byte: {' '.join(RELAYED)}. "
        "SIGTERM or SIGINT ends the router in order, a second one at once.",
    )
    parser.add_argument(
        "--attn",
        metavar="URL",
        nargs="+",
        action="extend",
        required=True,
        help="attention servers, http://host:port each; may be given several times",
    )

    def flag(field: str, text: str, metavar: str) -> None:
        default = DEFAULTS[field]
        parser.add_argument(
            f"--{field.replace('_', '-')}",
            type=type(default),
            default=default,
            metavar=metavar,
            help=f"{text} (default: %(default)s)",
        )

    flag(
        "policy",
        "which ready server gets a request: the one with the fewest requests of this router in "
        "flight, or each in turn",
        "{" + ",".join(POLICIES) + "}",
    )
    flag("host", "address to listen on; 0.0.0.0 for every interface", "HOST")
    flag("port", "port to listen on; 0 takes a free one and logs it", "PORT")
    flag("status_interval_s", f"seconds between two polls of a server's {STATUS}", "S")
    flag("status_timeout_s", "seconds one poll may take", "S")
    flag(
        "max_missed_polls",
        "unanswered polls in a row that make a ready server count as unreachable; a refused "
        "connection does so at once",
        "N",
    )
    flag("connect_timeout_s", "seconds to open a connection before the next server is tried", "S")
    flag("shutdown_timeout_s", "seconds that running requests get to finish after SIGTERM", "S")
    flag(
        "relay_processes",
        "processes that relay and share the port; 0 takes one for each core, up to 4",
        "N",
    )
    flag(
        "hold_timeout_s",
        "seconds that a request waits while no server is ready and one is stalled; then 503",
        "S",
    )
    flag(
        "retry_budget",
        "requests that may be sent again to another server, for each request that comes, when "
        "theirs breaks off before it answered; 0 sends none again",
        "SHARE",
    )
    flag("max_concurrent_requests", "requests let in at once; more of them wait", "N")
    flag("queue_size", "requests that wait to be let in; more of them get 429", "N")
    flag("queue_timeout_s", "seconds that one waits to be let in; then 503", "S")
    flag("header_timeout_s", "seconds a request's header may take; then 408", "S")
    flag("body_timeout_s", "seconds between two pieces of a request's body; then 408", "S")
    flag("keep_alive_timeout_s", "seconds that a connection stays open without a request", "S")
    flag("max_headers", "fields of a request's header; more of them get 431", "N")
    flag("max_header_bytes", "largest header of a request; a larger one gets 431", "BYTES")
    flag(
        "max_replay_body_bytes",
        "largest request body that is read whole before it is sent on, and kept to be sent again; "
        "a larger one is passed on as it comes",
        "BYTES",
    )
    flag("max_body_bytes", "largest request body; a larger one is answered with 413", "BYTES")
    flag("log_level", "what is logged to stderr", "{" + ",".join(LOG_LEVELS) + "}")
    return parser


def _checked_url(text: str) -> str:
    wanted = "wanted http://host:port or https://host:port with nothing after the port"
    try:
        url = URL(text)
        port = url.explicit_port
    except ValueError as error:
        raise ConfigError(f"--attn got {text!r} ({error}); {wanted}") from error
    is_bare = url.path in ("", "/") and not url.query_string and not url.fragment and not url.user
    if url.scheme not in ("http", "https") or not url.host or port is None or not is_bare:
        raise ConfigError(f"--attn got {text!r}; {wanted}")
    return str(URL.build(scheme=url.scheme, host=url.host, port=port)).rstrip("/")


def _check_choice(flag: str, got: str, choices: Sequence[str]) -> None:
    if got not in choices:
        raise ConfigError(f"{flag} got {got!r}; choose one of {', '.join(choices)}")


def _check_range(flag: str, got: float, low: float, high: float) -> None:
    if not low <= got <= high:
        raise ConfigError(f"{flag} got {got}; choose a value from {low} to {high}")
