"""Who may attach: each refusal names both values, and a link that is attached goes on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import SECRET, make_gate, make_spec
from traffic import SEED, exchange, rows_to
from transports import Fleet, ReferenceExperts

from sglang_afd.errors import ConfigError, Refused
from sglang_afd.protocol.messages import RefusalCode
from sglang_afd.transport.base import PeerAttached, PeerGone
from sglang_afd.transport.zmq_hub import ZmqHub

SPEC = make_spec(hidden_size=128)  # slots have room for rows of such a size in any dtype
EXPERTS = ReferenceExperts(SPEC, 1, SEED)
OTHER_SECRET = b"another secret, as long"


@contextmanager
def undisturbed(fleet: Fleet, secret: bytes = b"") -> Iterator[None]:
    """An attached link serves before and after, and the rank tells of no other peer."""
    [rank] = fleet.start(SPEC, EXPERTS.run, secret=secret)
    link, rows = fleet.attach(SPEC, secret=secret), rows_to(SPEC, 3)
    assert torch.equal(exchange(link, rows), EXPERTS.expected(1, rows))

    yield

    assert torch.equal(exchange(link, rows), EXPERTS.expected(1, rows))
    assert (rank.count(PeerAttached), rank.count(PeerGone)) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (
            {"package_version": "0.9.9"},
            RefusalCode.VERSION,
            "sglang-afd version differs: the attention server has 0.9.9, the MLP server has 0.1.0",
        ),
        (
            {"sglang_version": "0.6.0"},
            RefusalCode.VERSION,
            "SGLang version differs: the attention server has 0.6.0, the MLP server has 0.5.17",
        ),
        (
            {"fingerprint": "cd" * 32},
            RefusalCode.MODEL,
            f"fingerprint differs: the attention server has {'cd' * 32}, the MLP server has "
            f"{'ab' * 32}",
        ),
        (
            {"dtype": "bfloat16"},
            RefusalCode.MODEL,
            "dtype differs: the attention server has bfloat16, the MLP server has float32",
        ),
        (
            {"top_k": 1},
            RefusalCode.MODEL,
            "top-k differs: the attention server has 1, the MLP server has 2",
        ),
        (
            {"max_rows": 4},
            RefusalCode.MODEL,
            "rows per exchange differs: the attention server has 4, the MLP server has 5",
        ),
        (
            {"dispatch_dtype": "fp8"},
            RefusalCode.MODEL,
            "dtype of dispatched rows differs: the attention server has fp8, the MLP server has "
            "float32; start both with the same --afd-dispatch-dtype",
        ),
        (
            {"transport": "cuda_ipc"},
            RefusalCode.MODEL,
            "transport differs: the attention server has cuda_ipc, the MLP server has zmq; start "
            "both with the same --afd-transport",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_server_that_differs_is_refused_with_both_values(
    fleet: Fleet, changes: dict[str, Any], code: RefusalCode, message: str
) -> None:
    with undisturbed(fleet), pytest.raises(Refused) as caught:
        fleet.attach(make_spec(hidden_size=128, **changes))

    assert caught.value.code == code
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("of_mlp", "of_attn", "message"),
    [
        (SECRET, OTHER_SECRET, "the MLP server's secret is not this attention server's"),
        (SECRET, b"", "the MLP server requires a shared secret and the attention server has none"),
        (b"", SECRET, "the attention server requires a shared secret and the MLP server has none"),
    ],
)
def test_a_server_without_the_secret_is_refused(
    fleet: Fleet, of_mlp: bytes, of_attn: bytes, message: str
) -> None:
    with undisturbed(fleet, of_mlp), pytest.raises(Refused) as caught:
        fleet.attach(SPEC, secret=of_attn)

    assert caught.value.code == RefusalCode.SECRET
    assert message in str(caught.value)


def test_servers_with_the_same_secret_attach(fleet: Fleet) -> None:
    with undisturbed(fleet, SECRET):
        pass


def test_a_server_beyond_the_limit_is_refused(fleet: Fleet) -> None:
    fleet.start(SPEC, EXPERTS.run, max_peers=1)
    fleet.attach(SPEC)

    with pytest.raises(Refused, match="already serves 1 attention servers, its limit") as caught:
        fleet.attach(SPEC)

    assert caught.value.code == RefusalCode.CAPACITY


def test_ranks_in_another_order_are_refused(fleet: Fleet) -> None:
    experts = ReferenceExperts(SPEC, 2, SEED)
    first, second = fleet.start(SPEC, experts.run, 2)

    with pytest.raises(ConfigError, match="is rank 1 of 2, expected rank 0 of 2"):
        fleet.attach(SPEC, ranks=[second, first])


def test_a_group_without_one_of_its_ranks_is_refused(fleet: Fleet) -> None:
    experts = ReferenceExperts(SPEC, 2, SEED)
    first, _ = fleet.start(SPEC, experts.run, 2)

    with pytest.raises(ConfigError, match="is rank 0 of 2, expected rank 0 of 1"):
        fleet.attach(SPEC, ranks=[first])


def test_a_path_on_which_another_server_listens_is_not_taken_over(tmp_path: Path) -> None:
    path = f"ipc://{tmp_path}/exchange"
    first = ZmqHub(make_gate(), path, heartbeat_timeout_s=1.0)
    try:
        with pytest.raises(ConfigError, match="another process listens on --afd-listen"):
            ZmqHub(make_gate(), path, heartbeat_timeout_s=1.0)
    finally:
        first.close()

    again = ZmqHub(make_gate(), path, heartbeat_timeout_s=1.0)
    again.close()
