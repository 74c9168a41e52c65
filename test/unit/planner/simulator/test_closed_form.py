"""Without noise the simulation is the closed form; with noise, the closed form with a barrier."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated import LAYERS, both, deployment, scenario

from sglang_afd.planner.barrier import gaussian_barrier_us
from sglang_afd.planner.pipeline import Pipeline
from sglang_afd.planner.predict import predict
from sglang_afd.planner.simulator.disturbance import Disturbance
from sglang_afd.planner.simulator.server import Server
from sglang_afd.planner.simulator.simulation import Options, simulate

# Attention GPUs, MLP GPUs, width of a copy: one server to several groups.
SPLITS = [(1, 1, 1), (3, 1, 1), (7, 1, 1), (4, 4, 4), (8, 2, 2), (12, 4, 2), (12, 2, 2)]
ROUNDED = 1e-9  # sums of a thousand floats


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_without_noise_step_and_throughput_are_those_of_the_closed_form(
    split: tuple[int, int, int], m: int
) -> None:
    for batch in (8, 64, 300):
        predicted, found = both(deployment(*split, m=m, batch=batch))

        assert found.step.p50_us == pytest.approx(predicted.step_us, rel=ROUNDED), batch
        assert found.step.p99_us == pytest.approx(predicted.step_us, rel=ROUNDED), batch
        assert found.tokens_per_s_per_gpu == pytest.approx(
            predicted.tokens_per_s_per_gpu, rel=ROUNDED
        ), batch


def test_groups_of_unequal_size_keep_within_three_percent() -> None:
    predicted, found = both(deployment(7, 2, 1))

    assert found.num_groups == 2
    assert found.step.mean_us == pytest.approx(predicted.step_us, rel=0.03)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("peers", [1, 4, 8])
def test_without_rounds_every_exchange_reads_the_weights(peers: int, m: int) -> None:
    where = deployment(peers, 1, m=m)
    alone, _ = both(deployment(1, 1, m=m))
    busy_us = LAYERS * m * peers * alone.stages.mlp_us

    _, found = both(where, has_rounds=False)

    assert found.peers_per_run == 1
    assert found.step.mean_us == pytest.approx(max(busy_us, alone.step_us), rel=0.03)


@pytest.mark.parametrize("peers", [2, 8, 16])
@pytest.mark.parametrize("jitter", [0.05, 0.2])
def test_one_micro_batch_waits_for_the_slowest_peer_as_the_gaussian_barrier_says(
    peers: int, jitter: float
) -> None:
    predicted, found = both(
        deployment(peers, peers // 2, m=1),
        Disturbance(attn_jitter=jitter, start_spread=0),
        num_steps=12,
    )
    stages = predicted.stages
    barrier_us = gaussian_barrier_us(0, stages.attn_us, jitter * stages.attn_us, peers)
    layer_us = barrier_us + stages.mlp_us + 2 * stages.exchange_us

    wanted_us = LAYERS * layer_us + predicted.outside_layers_us
    # 12 steps of 12 layers: the mean of 144 draws of a maximum.
    assert found.step.mean_us == pytest.approx(wanted_us, rel=0.015)
    assert found.step.mean_us > 1.005 * predicted.step_us


@pytest.mark.parametrize(
    ("m", "jitter", "lowest", "highest"),
    # 3 and 4 micro-batches hide what the closed form counts: it is an upper bound.
    [(1, 0.05, -1, 1), (1, 0.2, -1.5, 1.5), (2, 0.05, -2, 5), (2, 0.2, -4, 9), (3, 0.05, -1, 6)],
)
@pytest.mark.parametrize(("peers", "mlp", "batch"), [(8, 2, 64), (16, 4, 200), (28, 4, 96)])
def test_a_prediction_with_jitter_is_as_near_as_its_page_says(
    peers: int, mlp: int, batch: int, m: int, jitter: float, lowest: float, highest: float
) -> None:
    world = scenario(layers=24)
    where = deployment(peers, mlp, m=m, batch=batch)
    _, found = both(where, Disturbance(attn_jitter=jitter, start_spread=0), world, num_steps=10)

    predicted_us = predict(replace(world, jitter=jitter), where).step_us

    assert lowest <= 100 * (predicted_us / found.step.mean_us - 1) <= highest


def test_a_simulation_draws_its_own_jitter_only() -> None:
    where, world = deployment(m=3), scenario()
    few = Options(num_steps=2, warm_steps=1)
    quiet = simulate(world, where, options=few)

    # The closed form refuses so much of three micro-batches.
    found = simulate(replace(world, jitter=0.1), where, options=few)

    assert found.step == quiet.step


@pytest.mark.parametrize(("peers", "mlp", "batch"), [(2, 1, 300), (4, 1, 300), (8, 1, 200)])
def test_two_micro_batches_wait_for_the_longer_of_experts_and_slowest_peer(
    peers: int, mlp: int, batch: int
) -> None:
    jitter, world = 0.1, scenario(layers=24)
    predicted, found = both(
        deployment(peers, mlp, batch=batch),
        Disturbance(attn_jitter=jitter, start_spread=0),
        world,
    )
    stages = predicted.stages
    pipeline = Pipeline(
        attn_us=gaussian_barrier_us(stages.mlp_us, stages.attn_us, jitter * stages.attn_us, peers),
        mlp_us=stages.mlp_us,
        exchange_us=stages.exchange_us,
        num_layers=24,
        num_micro_batches=2,
    )

    # Its source says 10 % (arXiv 2601.21351); micro-batches that run ahead make it an upper bound.
    wanted_us = pipeline.layers_us + predicted.outside_layers_us
    assert found.step.mean_us == pytest.approx(wanted_us, rel=0.04)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(("peers", "std"), [(4, 4000), (16, 4000), (16, 8000)])
def test_unequal_contexts_cost_what_the_barrier_of_the_closed_form_says(
    peers: int, std: float, m: int
) -> None:
    world = scenario(context_std=std)
    where = deployment(peers, peers // 4, m=m, batch=32)
    equal, _ = both(where)

    predicted, found = both(where, Disturbance(context_memory=0.0), world, num_steps=60)

    assert predicted.step_us >= equal.step_us
    assert found.step.mean_us == pytest.approx(predicted.step_us, rel=0.03)


@pytest.mark.parametrize("fault", ["exchange", "combine", "experts"])
def test_a_planted_fault_is_far_from_the_closed_form(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = deployment(8, 2, m=1)
    right, _ = both(where)
    decode = Server.begin

    def begin(self: Server, now_us: float) -> bool:
        has_begun = decode(self, now_us)
        if fault == "exchange" and self.plan is not None:
            self.plan = replace(self.plan, back_us=[(0.0,)] * len(self.plan.back_us))
        if fault == "combine" and self.plan is not None:
            self.plan = replace(self.plan, combine_us=[5.0] * len(self.plan.back_us))
        return has_begun

    monkeypatch.setattr(Server, "begin", begin)
    if fault == "experts":
        path = "sglang_afd.planner.simulator.planned.PlannedRanks.unit_us"
        monkeypatch.setattr(path, lambda self, rank, unit: self._table.decode_us(64))

    _, found = both(where)

    assert abs(found.step.mean_us / right.step_us - 1) > 1e-3
