from __future__ import annotations

import pytest

from sglang_afd.fleet.gpus import Gpu
from sglang_afd.fleet.placement import Placement, place


def placed(num_gpus: int, *, attn: int, mlp: int, spares: int = 0) -> Placement:
    gpus = [Gpu(id=f"GPU-{index}", model="NVIDIA H200") for index in range(num_gpus)]
    return place(attn=attn, mlp=mlp, spares=spares, gpus=gpus)


def test_with_enough_gpus_every_server_has_its_own() -> None:
    placement = placed(4, attn=2, mlp=1, spares=1)

    assert placement.index_of == {"mlp-0": 0, "mlp-1": 3, "attn-0": 1, "attn-1": 2}
    assert not placement.is_shared


def test_attention_servers_share_what_the_mlp_ranks_leave() -> None:
    placement = placed(4, attn=5, mlp=2)

    assert [placement.index_of[f"mlp-{rank}"] for rank in range(2)] == [0, 1]
    assert [placement.index_of[f"attn-{index}"] for index in range(5)] == [2, 3, 2, 3, 2]


@pytest.mark.parametrize(
    ("num_gpus", "mlp", "ranks", "attn"),
    [(2, 2, [0, 1], [0, 1, 0]), (2, 3, [0, 1, 0], [1, 0, 1]), (1, 2, [0, 0], [0, 0, 0])],
)
def test_with_no_gpu_left_attention_servers_share_with_mlp_ranks_in_turn(
    num_gpus: int, mlp: int, ranks: list[int], attn: list[int]
) -> None:
    placement = placed(num_gpus, attn=3, mlp=mlp)

    assert [placement.index_of[f"mlp-{rank}"] for rank in range(mlp)] == ranks
    assert [placement.index_of[f"attn-{index}"] for index in range(3)] == attn
    assert placement.is_shared


def test_a_spare_waits_beside_the_rank_of_its_number() -> None:
    placement = placed(3, attn=1, mlp=2, spares=2)

    assert placement.index_of["mlp-2"] == placement.index_of["mlp-0"]
    assert placement.index_of["mlp-3"] == placement.index_of["mlp-1"]


def test_every_server_is_described_in_one_line() -> None:
    placement = placed(2, attn=2, mlp=1)

    assert placement.describe() == [
        "mlp-0 on GPU 0 (NVIDIA H200)",
        "attn-0 on GPU 1 (NVIDIA H200), shared with attn-1",
        "attn-1 on GPU 1 (NVIDIA H200), shared with attn-0",
    ]
