"""Every setting of the two roles, checked once, at the boundary."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from sglang_afd.errors import ConfigError

ROUNDS_VARIABLE = "SGLANG_AFD_ROUNDS"  # for measurements: "off" serves first come, first served
SGLANG_WATCHDOG_S = 300.0  # SGLang's default --watchdog-timeout, which ends a stuck scheduler
MAX_PEERS = 1024  # so many fit into the message that tells other ranks of one unit
FP8 = "fp8"  # of --afd-dispatch-dtype
AUTO_GRAPH_SLOTS = 2  # micro-batches that "auto" tries at most where steps are CUDA graphs
MAX_STEP_SHARE = 0.75  # of SGLang's watchdog: what a step may take with all its waits
MAX_MLP_RANKS = 64  # whose replies one slot of transport/cuda_ipc may wait for
WAIT_POLICIES = ("auto", "poll", "memop")


class Role(StrEnum):
    """What a server does; the values match SGLang's names of the layers."""

    ATTN = "attn"
    MLP = "mlp"


class Transport(StrEnum):
    """How rows travel between the roles."""

    ZMQ = "zmq"  # through host memory, over ZeroMQ
    CUDA_IPC = "cuda_ipc"  # on the GPUs of one host, each reading and writing the other's memory


def choose_transport(flag: str, *, is_cuda: bool, address: str) -> Transport:
    """What `--afd-transport` means for a server.

    Args:
        flag: Its value.
        is_cuda: Does this server run on a CUDA device?
        address: The exchange address; the GPUs of other hosts cannot be reached.

    Raises:
        ConfigError: cuda_ipc was asked for, and cannot work.
    """
    is_one_host = address.startswith("ipc://")
    if flag == "auto":
        return Transport.CUDA_IPC if is_cuda and is_one_host else Transport.ZMQ
    if flag == Transport.CUDA_IPC and not is_cuda:
        raise ConfigError("--afd-transport cuda_ipc needs --device cuda; use zmq, or leave it out")
    if flag == Transport.CUDA_IPC and not is_one_host:
        raise ConfigError(
            f"--afd-transport cuda_ipc needs an exchange address on this host, ipc:///path, not "
            f"{address}; see --afd-listen"
        )
    return Transport(flag)


def has_rounds() -> bool:
    """Whether this MLP server forms rounds, as `SGLANG_AFD_ROUNDS` says.

    Raises:
        ConfigError: It is neither on nor off.
    """
    value = os.environ.get(ROUNDS_VARIABLE, "on")
    if value not in ("on", "off"):
        raise ConfigError(f"{ROUNDS_VARIABLE}={value} is neither on nor off")
    return value == "on"


@dataclass(frozen=True, kw_only=True)
class AfdConfig:
    """What our flags say; SGLang's own flags stay SGLang's `ServerArgs`."""

    role: Role
    router_url: str = ""  # http URLs of routers, with commas; the first that answers is told
    advertise_url: str = ""  # this server's own HTTP address for others; "" by --host and --port
    server_id: str = ""  # its name, the same over restarts; "" by its role and address
    drain_timeout_s: float = 30.0  # how long it finishes requests after SIGTERM, 0 .. 86400
    mlp_url: str = ""  # attn: http URLs where MLP rank 0 may be; required without a router
    listen: str = ""  # mlp: exchange address, ipc://path or tcp://host:port; "" makes an ipc path
    ep_rank: int = -1  # mlp: this server's rank, 0 .. ep_size - 1; -1 starts every rank
    leader_url: str = ""  # mlp: http URLs where rank 0 may be; required of others, and of spares
    secret_file: str = ""  # path, mode 0600; "" allows loopback addresses only
    num_micro_batches: str = "auto"  # attn: slices of a step, "auto" or "1" .. "4"
    trace_file: str = ""  # path of a timeline to write; "" writes none
    is_spare: bool = False  # mlp: wait until a rank is missing, then take its place
    transport: str = "auto"  # of rows: "auto", "zmq" or "cuda_ipc"
    dispatch_dtype: str = "auto"  # of rows sent to the experts: "auto" is the model's, or "fp8"
    max_rows: int = 2048  # rows of one exchange, 1 .. 65536; larger batches go in pieces
    wait_policy: str = "auto"  # cuda_ipc: how a stream waits for rows: "auto", "poll" or "memop"
    max_mlp_ranks: int = 4  # attn, cuda_ipc: MLP ranks whose replies have room, 1 .. 64
    max_peers: int = 64  # mlp: attention servers attached at once, 1 .. 1024
    mlp_cuda_graph_bs: str = ""  # mlp, cuda_ipc: rows of a unit with a graph, with commas; "" usual
    mlp_cuda_graph_max_bs: int = 1024  # mlp, cuda_ipc: of those the largest, 1 .. 65536
    is_mlp_cuda_graph_disabled: bool = False  # mlp, cuda_ipc: launch every unit kernel by kernel
    deep_gemm_sms: int = 0  # mlp: multiprocessors for DeepGEMM's kernels, 0 .. 1024; 0 uses all
    stall_timeout_s: float = 60.0  # how long a step waits, then how long requests do; 0.1 .. 300
    attach_timeout_s: float = 300.0  # attn: longest wait for the MLP servers at start-up, >= 1
    heartbeat_timeout_s: float = 1.0  # silence after which a peer counts as gone, 0.1 .. 60
    allow_untested_model: bool = False  # serve an architecture that the test-suite does not cover

    @property
    def router_urls(self) -> tuple[str, ...]:
        """The addresses of `--afd-router`, in order."""
        return split_urls(self.router_url)

    @property
    def mlp_urls(self) -> tuple[str, ...]:
        """The addresses of `--afd-mlp`, in order."""
        return split_urls(self.mlp_url)

    @property
    def leader_urls(self) -> tuple[str, ...]:
        """The addresses of `--afd-leader`, in order."""
        return split_urls(self.leader_url)

    def __post_init__(self) -> None:
        if self.num_micro_batches not in ("auto", "1", "2", "3", "4"):
            raise ConfigError(
                f"--afd-num-micro-batches {self.num_micro_batches} is neither auto nor 1 to 4"
            )
        if self.transport not in ("auto", *Transport):
            raise ConfigError(f"--afd-transport {self.transport} is not auto, zmq or cuda_ipc")
        if self.dispatch_dtype not in ("auto", FP8):
            raise ConfigError(f"--afd-dispatch-dtype {self.dispatch_dtype} is neither auto nor fp8")
        if self.dispatch_dtype == FP8 and self.transport == Transport.ZMQ:
            raise ConfigError(
                "--afd-dispatch-dtype fp8 needs --afd-transport cuda_ipc; rows in host memory "
                "travel in the model's dtype"
            )
        if self.wait_policy not in WAIT_POLICIES:
            raise ConfigError(f"--afd-wait-policy {self.wait_policy} is not auto, poll or memop")
        _check_range("--afd-max-rows", self.max_rows, 1, 65536)
        _check_range("--afd-max-mlp-ranks", self.max_mlp_ranks, 1, MAX_MLP_RANKS)
        _check_range("--afd-max-peers", self.max_peers, 1, MAX_PEERS)
        _check_range("--afd-mlp-cuda-graph-max-bs", self.mlp_cuda_graph_max_bs, 1, 65536)
        _check_range("--afd-deep-gemm-sms", self.deep_gemm_sms, 0, 1024)
        _check_graph_rows(self.mlp_cuda_graph_bs, self.mlp_cuda_graph_max_bs)
        _check_range("--afd-stall-timeout", self.stall_timeout_s, 0.1, SGLANG_WATCHDOG_S)
        _check_range("--afd-attach-timeout", self.attach_timeout_s, 1, 86400)
        _check_range("--afd-heartbeat-timeout", self.heartbeat_timeout_s, 0.1, 60)
        self._check_router()
        if self.role is Role.ATTN:
            self._check_attn()
        else:
            self._check_mlp()

    def _check_router(self) -> None:
        _check_urls("--afd-router", self.router_url)
        if self.advertise_url:
            _check_advertised(self.advertise_url)
        if self.server_id and not _SERVER_ID.fullmatch(self.server_id):
            raise ConfigError(
                f"--afd-server-id {self.server_id} is no name of 1 to 64 letters, digits and ._:-"
            )
        _check_range("--afd-drain-timeout", self.drain_timeout_s, 0, 86400)
        default = AfdConfig.__dataclass_fields__["drain_timeout_s"].default
        if self.drain_timeout_s != default and not self.router_url:
            raise ConfigError(
                "--afd-drain-timeout needs --afd-router URL: without one nobody sends requests "
                "elsewhere meanwhile; leave it out"
            )

    def _check_attn(self) -> None:
        if not self.mlp_url and not self.router_url:
            raise ConfigError(
                "--role attn needs --afd-mlp URL, the HTTP address of MLP rank 0, "
                "e.g. --afd-mlp http://127.0.0.1:30010, or --afd-router URL, where it is told"
            )
        _check_urls("--afd-mlp", self.mlp_url)
        self._refuse_flags_of(Role.MLP)

    def _refuse_flags_of(self, other: Role) -> None:
        for field, flag in _FLAGS_OF[other].items():
            if getattr(self, field) != self.__dataclass_fields__[field].default:
                raise ConfigError(
                    f"{flag} belongs to --role {other}; leave it out with --role {self.role}"
                )

    def _check_mlp(self) -> None:
        self._refuse_flags_of(Role.ATTN)
        if self.ep_rank < -1:
            raise ConfigError(f"--afd-ep-rank {self.ep_rank} is not a rank; ranks start at 0")
        _check_urls("--afd-leader", self.leader_url)
        if self.is_spare:
            self._check_spare()
            return
        if self.ep_rank > 0 and not self.leader_url and not self.router_url:
            raise ConfigError(
                f"--afd-ep-rank {self.ep_rank} needs --afd-leader URL, the HTTP address of rank 0, "
                f"through which attention servers find it, or --afd-router URL, where it is told"
            )
        if self.ep_rank == -1 and self.leader_url:
            raise ConfigError(
                f"--afd-leader {self.leader_url} needs --afd-ep-rank R, or --afd-spare; without a "
                f"rank all ranks start on this host, and rank 0 of them leads"
            )
        if self.ep_rank == 0 and len(self.leader_urls) == 1:
            raise ConfigError(
                "--afd-ep-rank 0 is the leader; leave --afd-leader out, or give the addresses of "
                "its spares as well"
            )
        self._check_listen()

    def _check_spare(self) -> None:
        if not self.leader_url:
            raise ConfigError(
                "--afd-spare needs --afd-leader URL[,URL...], the HTTP addresses where rank 0 may "
                "be; with this server's own among them it can become rank 0, too"
            )
        if self.ep_rank != -1:
            raise ConfigError(
                f"--afd-spare with --afd-ep-rank {self.ep_rank}: a spare takes whichever rank is "
                f"missing; leave one of the two out"
            )
        self._check_listen()

    def _check_listen(self) -> None:
        if self.listen:
            check_exchange_address("--afd-listen", self.listen)


# Settings that only one role reads; given to the other they would have no effect.
_FLAGS_OF = {
    Role.ATTN: {
        "mlp_url": "--afd-mlp",
        "stall_timeout_s": "--afd-stall-timeout",
        "attach_timeout_s": "--afd-attach-timeout",
        "num_micro_batches": "--afd-num-micro-batches",
        "max_mlp_ranks": "--afd-max-mlp-ranks",
    },
    Role.MLP: {
        "listen": "--afd-listen",
        "ep_rank": "--afd-ep-rank",
        "leader_url": "--afd-leader",
        "max_peers": "--afd-max-peers",
        "is_spare": "--afd-spare",
        "mlp_cuda_graph_bs": "--afd-mlp-cuda-graph-bs",
        "mlp_cuda_graph_max_bs": "--afd-mlp-cuda-graph-max-bs",
        "is_mlp_cuda_graph_disabled": "--afd-disable-mlp-cuda-graph",
        "deep_gemm_sms": "--afd-deep-gemm-sms",
    },
}


_SERVER_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_ADVERTISED = re.compile(
    r"https?://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}/?", re.ASCII
)


def check_exchange_address(flag: str, address: str) -> None:
    """Refuse what ZeroMQ could not bind or connect.

    Raises:
        ConfigError: Neither `ipc://path` nor `tcp://host:port`.
    """
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise ConfigError(f"{flag} {address} is no address: {error}") from None
    if parts.scheme == "ipc":
        path = address.removeprefix("ipc://")
        if path.startswith("/") and len(path.encode()) <= 107:
            return
        raise ConfigError(
            f"{flag} {address} needs an absolute path of at most 107 bytes after ipc://"
        )
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None:
        raise ConfigError(f"{flag} {address} is neither ipc:///path nor tcp://host:port")


def split_urls(text: str) -> tuple[str, ...]:
    """Addresses with commas between them, without slashes at their ends."""
    return tuple(url.strip().rstrip("/") for url in text.split(",")) if text else ()


def _check_urls(flag: str, text: str) -> None:
    urls = split_urls(text)
    for url in text.split(",") if text else ():
        _check_url(flag, url.strip())
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"{flag} names {url} twice; give each address once")


def _check_url(flag: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        is_sound = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_sound = False
    if not is_sound:
        raise ConfigError(f"{flag} {url} is not an address like http://host:port")


def _check_advertised(url: str) -> None:
    if not _ADVERTISED.fullmatch(url) or not _has_sound_port(url):
        raise ConfigError(
            f"--afd-advertise-url {url} is not an address like http://host:port, without a path"
        )


def _has_sound_port(url: str) -> bool:
    try:
        return bool(urlsplit(url).port)
    except ValueError:
        return False


def _check_graph_rows(text: str, most: int) -> None:
    flag = "--afd-mlp-cuda-graph-bs"
    for rows in text.split(",") if text else ():
        if not rows.strip().isdecimal() or int(rows) < 1:
            raise ConfigError(f"{flag} {text} is no list like 8,64,256 of rows from 1 on")
        if int(rows) > most:
            raise ConfigError(
                f"{flag} {text} has {rows.strip()} rows, --afd-mlp-cuda-graph-max-bs allows "
                f"{most}; raise that, or leave the larger ones out"
            )


def _check_range(flag: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise ConfigError(
            f"{flag} {value:g} is out of range; {lowest:g} to {highest:g} are allowed"
        )
