"""Fixtures that real servers hang on; the expensive ones live as long as the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import checkpoints
import fleet
import pytest
import replay
import replay_trace
from compare import ask_at_once, ask_one_by_one
from fleet import AttnPair, Oracle
from replay import Crowd
from servers import Server, Zygote, running

from sglang_afd.ports import free_ports

TIMEOUT_S = 600.0  # of a test with its fixtures, which start servers on a machine that may be busy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts servers."""
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Forks servers."""
    zygote = Zygote(tmp_path_factory.mktemp("servers"))
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE, 16 experts, top-4."""
    return checkpoints.make_qwen3_moe(tmp_path_factory.mktemp("qwen3") / "model")


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2-MoE with a shared expert, in several shards."""
    return checkpoints.make_qwen2_moe_shared_expert(tmp_path_factory.mktemp("qwen2") / "model")


def _consult(zygote: Zygote, model: Path) -> Oracle:
    server = fleet.stock_server(zygote, model)
    with running([server]):
        return Oracle(
            model=model,
            one_by_one=ask_one_by_one(server.url),
            at_once=ask_at_once([server.url]),
        )


@pytest.fixture(scope="session")
def qwen3_oracle(zygote: Zygote, qwen3: Path) -> Oracle:
    """Stock SGLang on the Qwen3-MoE checkpoint."""
    return _consult(zygote, qwen3)


@pytest.fixture(scope="session")
def qwen2_oracle(zygote: Zygote, qwen2: Path) -> Oracle:
    """Stock SGLang on the Qwen2-MoE checkpoint."""
    return _consult(zygote, qwen2)


def _attn_pair(zygote: Zygote, oracle: Oracle) -> Iterator[AttnPair]:
    ports = free_ports(3)
    attn = [fleet.start_attn(zygote, oracle.model, ports[0]) for _ in range(2)]
    with running(attn):
        yield AttnPair(oracle=oracle, attn=attn, mlp_ports=ports)


@pytest.fixture(scope="session")
def qwen3_pair(zygote: Zygote, qwen3_oracle: Oracle) -> Iterator[AttnPair]:
    """Two attention servers for Qwen3-MoE; tests start the MLP servers."""
    yield from _attn_pair(zygote, qwen3_oracle)


@pytest.fixture(scope="session")
def qwen2_pair(zygote: Zygote, qwen2_oracle: Oracle) -> Iterator[AttnPair]:
    """Two attention servers for Qwen2-MoE; tests start the MLP servers."""
    yield from _attn_pair(zygote, qwen2_oracle)


@pytest.fixture(scope="session")
def trace(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Qwen3-MoE checkpoint dispatched for eight batches."""
    return replay_trace.record(qwen3, tmp_path_factory.mktemp("trace") / "trace.pt", num_parts=8)


@pytest.fixture(scope="module")
def ranks(zygote: Zygote, qwen3: Path, request: pytest.FixtureRequest) -> Iterator[list[Server]]:
    """So many MLP ranks for Qwen3-MoE as the parameter says."""
    with fleet.mlp_group(zygote, qwen3, request.param) as ranks:
        yield ranks


@pytest.fixture
def peers(
    zygote: Zygote, qwen3: Path, trace: Path, ranks: list[Server], tmp_path: Path
) -> Iterator[Crowd]:
    """Attention peers of `ranks`; tests add them."""
    with replay.crowd(zygote, qwen3, trace, ranks[0].port, tmp_path) as peers:
        yield peers
