"""One model's servers in the end-to-end tests: stock SGLang, attention servers, MLP ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compare import Answer
from servers import CPU_FLAGS, START_TIMEOUT_S, Server, Zygote, fetch, running

from sglang_afd.fingerprint import fingerprint
from sglang_afd.ports import free_ports


@dataclass(frozen=True)
class Oracle:
    """What stock SGLang answers for one checkpoint."""

    model: Path
    one_by_one: list[Answer]
    at_once: list[Answer]


@dataclass(frozen=True)
class AttnPair:
    """Two attention servers that look for MLP servers at `mlp_ports`."""

    oracle: Oracle
    attn: list[Server]
    mlp_ports: list[int]


MAX_ROWS = 48  # so that long prompts go in several pieces
# Where nobody falls silent on purpose, a busy machine shall not look as if somebody had.
CALM = ("--afd-heartbeat-timeout", "60")
FLAGS = ("--dtype", "float32", "--chunked-prefill-size", "128", "--sleep-on-idle")


def stock_server(zygote: Zygote, model: Path, *flags: str, plant: str | None = None) -> Server:
    """SGLang as it is, without any of our hooks; waited for."""
    argv = ["--model-path", str(model), *CPU_FLAGS, *FLAGS, *flags]
    server = zygote.start("stock", argv, plant=plant)
    server.wait("/health")
    return server


def start_attn(
    zygote: Zygote,
    model: Path,
    mlp_port: int,
    *flags: str,
    plant: str | None = None,
    env: dict[str, str] | None = None,
) -> Server:
    """An attention server, not waited for."""
    argv = [
        *("--role", "attn", "--model-path", str(model), *CPU_FLAGS, *FLAGS),
        *("--afd-mlp", f"http://127.0.0.1:{mlp_port}", "--afd-max-rows", str(MAX_ROWS)),
        *("--afd-attach-timeout", f"{2 * START_TIMEOUT_S:g}", *flags),
    ]
    return zygote.start("afd", argv, plant=plant, env=env)


def start_mlp(
    zygote: Zygote,
    model: Path,
    ports: Sequence[int],
    *flags: str,
    plant: str | None = None,
    env: dict[str, str] | None = None,
    only_rank: int | None = None,
) -> list[Server]:
    """One MLP server for each port (or `only_rank`'s), rank 0 first; not waited for."""
    servers = []
    for rank, port in enumerate(ports):
        if only_rank not in (None, rank):
            continue
        leader = ["--afd-leader", f"http://127.0.0.1:{ports[0]}"] if rank else []
        argv = [
            *("--role", "mlp", "--model-path", str(model), "--dtype", "float32"),
            *("--ep-size", str(len(ports)), "--afd-ep-rank", str(rank), *leader),
            *("--afd-max-rows", str(MAX_ROWS), *flags, "--port", str(port)),
        ]
        server = zygote.start("afd", argv, plant=plant, env=env)
        servers.append(Server(server.pid, port, server.log))
    return servers


@contextmanager
def mlp_group(
    zygote: Zygote,
    model: Path,
    num_ranks: int,
    *,
    plant: str | None = None,
    env: dict[str, str] | None = None,
) -> Iterator[list[Server]]:
    """A whole group, rank 0 first, that serves peers which come, leave and die, but never stop."""
    ranks = start_mlp(zygote, model, free_ports(num_ranks), *CALM, plant=plant, env=env)
    with running(ranks):
        for rank in ranks:
            rank.wait("/health")
        yield ranks


def wait_ready(server: Server) -> None:
    """Until an attention server is attached and warm."""
    server.wait("/afd/v1/status", lambda body: body["state"] == "ready")


def forget_prefixes(attn: Server) -> None:
    """Empty the cache of an attention server, as soon as it has done with its last request.

    NOTE: clients hear the end of an answer before SGLang's scheduler counts as idle.
    """
    status, answer = fetch(f"{attn.url}/flush_cache?timeout={START_TIMEOUT_S:g}", {})
    assert status == 200, answer


def fingerprint_of(model: Path) -> str:
    """As both roles compute it with the flags above."""
    return fingerprint(str(model), load_format="auto", overrides="{}")
