from __future__ import annotations

import pytest

from sglang_afd.config import AfdConfig, Role
from sglang_afd.mlp.ranks import leader_url


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:30010"),
        ("0.0.0.0", "http://127.0.0.1:30010"),
        ("::", "http://[::1]:30010"),
        ("::1", "http://[::1]:30010"),
        ("10.0.0.5", "http://10.0.0.5:30010"),
        ("localhost", "http://localhost:30010"),
    ],
)
def test_the_ranks_of_one_host_find_their_leader(host: str, expected: str) -> None:
    url = leader_url(host, 30010)

    assert url == expected
    assert AfdConfig(role=Role.MLP, ep_rank=1, leader_url=url)
