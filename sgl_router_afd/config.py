"""The router's settings: checked once, here, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import msgspec
from yarl import URL

from sgl_router_afd.control.policy import POLICIES
from sgl_router_afd.control.ratio import parse_ratio
from sgl_router_afd.keys import NO_KEY, Key
from sglang_afd.errors import ConfigError
from sglang_afd.protocol.server_url import Url, check_url

MAX_RELAYS_UNASKED = 4
DATA_PLANES = ("relay", "smg")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """What `python -m sgl_router_afd.launch_router` was asked to do.

    Raises: ConfigError, naming the flag, the value it got and the values it takes.
    """

    attn_urls: tuple[str, ...] = ()  # http(s)://host:port of attention servers to ask
    mlp_urls: tuple[str, ...] = ()  # the same of MLP servers
    ratio: str = ""  # attention to MLP servers of a group, e.g. 7:1; "" keeps groups even
    policy: str = "least_load"  # a key of `control.policy.POLICIES`
    data_plane: str = "relay"  # one of DATA_PLANES
    smg_args: str = ""  # more flags for smg, as a shell would read them
    control_port: int = 0  # with smg the port of the own endpoints; 0..65535, 0: `port` + 1
    state_file: str = ""  # path of what outlives the router; "" keeps nothing
    afd_secret: Key = NO_KEY  # servers that register must know it
    api_key: Key = NO_KEY  # clients must know it; pair probes send it
    admin_api_key: Key = NO_KEY  # whoever changes or reads the control plane must know it
    lease_s: float = 6.0  # seconds that a server may be silent; 0.3..3600
    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0 for every interface
    port: int = 30000  # 0..65535; 0 takes a free one, which the log names
    status_interval_s: float = 0.5  # seconds between two polls of a server; 0.01..60
    status_timeout_s: float = 2.0  # seconds one poll may take; 0.01..60
    connect_timeout_s: float = 5.0  # seconds to open a connection to a server; 0.01..300
    shutdown_timeout_s: float = 30.0  # seconds that running requests get after SIGTERM; 0..86400
    relay_processes: int = 0  # processes that relay; 0..64, see `num_relays`
    relay_timeout_s: float = 30.0  # seconds that what relays may be silent; 1..3600
    hold_timeout_s: float = 10.0  # seconds that a request waits for a server; 0..86400
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
        self._check_urls()
        _check_text("--host", self.host)
        _check_text("--state-file", self.state_file)
        parse_ratio(self.ratio)
        _check_choice("--policy", self.policy, tuple(POLICIES))
        _check_choice("--data-plane", self.data_plane, DATA_PLANES)
        _check_choice("--log-level", self.log_level, LOG_LEVELS)
        _check_range("--lease-s", self.lease_s, 0.3, 3600)
        _check_range("--port", self.port, 0, 65535)
        self._check_data_plane()
        _check_range("--status-interval-s", self.status_interval_s, 0.01, 60)
        _check_range("--status-timeout-s", self.status_timeout_s, 0.01, 60)
        _check_range("--connect-timeout-s", self.connect_timeout_s, 0.01, 300)
        _check_range("--shutdown-timeout-s", self.shutdown_timeout_s, 0, 86400)
        _check_range("--relay-processes", self.relay_processes, 0, 64)
        _check_range("--relay-timeout-s", self.relay_timeout_s, 1, 3600)
        _check_range("--hold-timeout", self.hold_timeout_s, 0, 86400)
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

    def _check_urls(self) -> None:
        attn = tuple(_checked_url("--attn", url) for url in self.attn_urls)
        mlp = tuple(_checked_url("--mlp", url) for url in self.mlp_urls)
        for url in {*attn, *mlp}:
            if (attn + mlp).count(url) > 1:
                raise ConfigError(f"--attn and --mlp name {url} twice; give each server once")
        object.__setattr__(self, "attn_urls", attn)
        object.__setattr__(self, "mlp_urls", mlp)

    def _check_data_plane(self) -> None:
        _check_range("--control-port", self.control_port, 0, 65535)
        if self.data_plane == "relay":
            self._check_relay()
        elif self.port and self.port == self.control_port:
            raise ConfigError(
                f"--control-port got {self.control_port}, which is --port; choose another one"
            )
        elif self.port == 65535 and not self.control_port:
            raise ConfigError("--port got 65535, which no port follows; give --control-port")

    def _check_relay(self) -> None:
        if self.control_port:
            raise ConfigError(
                f"--control-port got {self.control_port}, and means nothing without --data-plane "
                "smg: relay processes answer for everything on --port; leave it out"
            )
        if self.smg_args:  # not shown: keys may be among them
            raise ConfigError(
                "--smg-args has no effect with --data-plane relay, which runs no smg; leave it "
                "out, or add --data-plane smg"
            )

    def for_relay(self) -> RouterConfig:
        """Without the keys that no relay process asks for: strangers speak to those."""
        return replace(self, afd_secret=NO_KEY, admin_api_key=NO_KEY)

    @property
    def num_relays(self) -> int:
        """Processes that relay; unless told otherwise one for each core, up to 4."""
        if self.data_plane != "relay":
            return 1
        return self.relay_processes or min(MAX_RELAYS_UNASKED, len(os.sched_getaffinity(0)))


DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(RouterConfig) if field.default is not MISSING
}


def _checked_url(flag: str, text: str) -> str:
    wanted = "wanted http://host:port or https://host:port with nothing after the port"
    try:
        url = URL(text)
        port = url.explicit_port
    except ValueError as error:
        raise ConfigError(f"{flag} got {text!r} ({error}); {wanted}") from error
    is_bare = url.path in ("", "/") and not url.query_string and not url.fragment and not url.user
    if url.scheme not in ("http", "https") or not url.host or port is None or not is_bare:
        raise ConfigError(f"{flag} got {text!r}; {wanted}")
    host = f"[{url.raw_host}]" if ":" in url.host else url.raw_host
    # As servers tell theirs, with the port of HTTP itself, since servers are told this one.
    checked = f"{url.scheme}://{host}:{port}"
    try:
        check_url(msgspec.convert(checked, Url))
    except ValueError as error:
        raise ConfigError(f"{flag} got {text!r} ({error}); {wanted}") from error
    return checked


def _check_text(flag: str, got: str) -> None:
    try:
        got.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{flag} got {got!r}, which is not UTF-8; give a name that is") from None


def _check_choice(flag: str, got: str, choices: Sequence[str]) -> None:
    if got not in choices:
        raise ConfigError(f"{flag} got {got!r}; choose one of {', '.join(choices)}")


def _check_range(flag: str, got: float, low: float, high: float) -> None:
    if not low <= got <= high:
        raise ConfigError(f"{flag} got {got}; choose a value from {low} to {high}")
