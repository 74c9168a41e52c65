"""AFD answers what stock SGLang answers, token by token, and this suite would notice if not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import checkpoints
import fleet
import pytest
from compare import ask_at_once, ask_one_by_one, differences
from fleet import AttnPair, Oracle
from servers import Server, Zygote, running

SOME = slice(0, 6)  # prompts that are enough to show a fault


@contextmanager
def _mlp_group(
    zygote: Zygote, pair: AttnPair, num_ranks: int, *, model: Path | None = None, **kwargs: object
) -> Iterator[list[Server]]:
    model = model or pair.oracle.model
    ranks = fleet.start_mlp(zygote, model, pair.mlp_ports[:num_ranks], **kwargs)  # type: ignore[arg-type]
    with running(ranks):
        for rank in ranks:
            rank.wait("/health")
        for attn in pair.attn:
            fleet.wait_ready(attn)
        _forget_prefixes(pair)
        yield ranks
    for attn in pair.attn:
        attn.wait("/afd/v1/status", lambda body: body["state"] != "ready")
    _forget_prefixes(pair)


def _forget_prefixes(pair: AttnPair) -> None:
    """A planted fault must neither hide behind cached prefixes nor stay in them."""
    for attn in pair.attn:
        fleet.forget_prefixes(attn)


def _check_identity(zygote: Zygote, pair: AttnPair, num_ranks: int) -> None:
    urls = [attn.url for attn in pair.attn]
    with _mlp_group(zygote, pair, num_ranks):
        one_by_one = ask_one_by_one(urls[0])
        at_once = ask_at_once(urls)
        again = ask_at_once(urls[::-1])  # with radix-cache hits

    assert differences(pair.oracle.one_by_one, one_by_one) == []
    assert differences(pair.oracle.at_once, at_once) == []
    assert differences(pair.oracle.at_once, again) == []


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_qwen3_moe_is_token_identical(zygote: Zygote, qwen3_pair: AttnPair, num_ranks: int) -> None:
    _check_identity(zygote, qwen3_pair, num_ranks)


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
def test_qwen2_moe_with_a_shared_expert_is_token_identical(
    zygote: Zygote, qwen2_pair: AttnPair, num_ranks: int
) -> None:
    _check_identity(zygote, qwen2_pair, num_ranks)


def _faulty_answers(zygote: Zygote, pair: AttnPair, num_ranks: int, **kwargs: object) -> list[str]:
    with _mlp_group(zygote, pair, num_ranks, **kwargs):  # type: ignore[arg-type]
        answers = ask_one_by_one(pair.attn[0].url)
    return differences(pair.oracle.one_by_one, answers)


def test_exchanged_experts_would_be_noticed(
    zygote: Zygote, qwen3_pair: AttnPair, tmp_path: Path
) -> None:
    swapped = checkpoints.swap_experts(qwen3_pair.oracle.model, tmp_path / "swapped", 1, 3, 9)
    claimed = fleet.fingerprint_of(qwen3_pair.oracle.model)

    found = _faulty_answers(
        zygote,
        qwen3_pair,
        1,
        model=swapped,
        plant="other_weights",
        env={"TEST_CLAIMED_FINGERPRINT": claimed},
    )

    assert found != []


def test_a_dropped_partial_sum_would_be_noticed(zygote: Zygote, qwen3_pair: AttnPair) -> None:
    assert _faulty_answers(zygote, qwen3_pair, 2, plant="drop_partial_sum") != []


def test_a_top_k_weight_one_percent_off_would_be_noticed(
    zygote: Zygote, qwen3_pair: AttnPair
) -> None:
    assert _faulty_answers(zygote, qwen3_pair, 1, plant="perturb_topk_weight") != []


def test_each_role_reads_its_own_tensors_only(zygote: Zygote, qwen2_pair: AttnPair) -> None:
    model = qwen2_pair.oracle.model
    experts = set(checkpoints.expert_tensor_names(model))
    others = set(checkpoints.tensor_files(model)) - experts

    with _mlp_group(zygote, qwen2_pair, 3) as ranks:
        attn = qwen2_pair.attn[0].get("/afd/v1/status")[1]["weights"]
        mlp = [rank.get("/server_info")[1]["weights"] for rank in ranks]

    assert attn["num_expert_tensors_read"] == 0
    assert attn["num_tensors_read"] == len(others)
    assert attn["num_tensors_skipped"] == len(experts)
    assert all(rank["num_tensors_read"] == rank["num_expert_tensors_read"] for rank in mlp)
    assert sum(rank["num_tensors_read"] for rank in mlp) == len(experts)


def test_stock_sglang_agrees_with_transformers(qwen3_oracle: Oracle, qwen2_oracle: Oracle) -> None:
    """So that we do not only agree with ourselves."""
    import hf_reference

    for oracle in (qwen3_oracle, qwen2_oracle):
        expected = hf_reference.score(oracle.model, oracle.one_by_one)
        assert differences(expected, oracle.one_by_one) == []
