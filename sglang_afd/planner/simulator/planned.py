"""Costs from the physics: what `predict` says, with a disturbance drawn over it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sglang_afd.errors import ConfigError
from sglang_afd.planner import attention
from sglang_afd.planner.deployment import Deployment, Mode
from sglang_afd.planner.predict import Prediction, predict
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.simulator.disturbance import Disturbance
from sglang_afd.planner.simulator.plan import StepPlan
from sglang_afd.rounds.splitting import split
from sglang_afd.rounds.units import Unit

Floats = NDArray[np.float64]

_LEAST = 0.2  # a draw is never below this share of its mean
_POOL = 4096  # draws of a rank at a time


class StageTable:
    """Stage times of any group of peers, by asking `predict`."""

    def __init__(self, scenario: Scenario, deployment: Deployment) -> None:
        if deployment.mode is Mode.COLOCATED:
            raise ConfigError(
                f"deployment {deployment.label}: only a disaggregated deployment has rounds to "
                "simulate; predict says what a colocated one does"
            )
        gpu, total = scenario.gpu, deployment.total_gpus
        link = gpu.bytes_per_us_among(total)
        self.scenario = replace(
            scenario,
            # Links as of the whole deployment, also where a part of it is asked for.
            gpu=replace(gpu, link_bytes_per_us=link, network_bytes_per_us=link),
            workload=replace(scenario.workload, context_std_tokens=0.0),
            jitter=0.0,  # a simulation draws it
        )
        self.deployment = deployment
        self.context_std_tokens = scenario.workload.context_std_tokens  # of a request
        self.num_copies = deployment.mlp_gpus // deployment.expert_parallel
        self._mlp_us: dict[int, float] = {}
        self._prefill: dict[int, tuple[float, float]] = {}

    @cached_property
    def prediction(self) -> Prediction:
        """Without a barrier: contexts are equal."""
        return predict(self.scenario, self.deployment)

    @cached_property
    def attn_us_per_token(self) -> float:
        """What one more token of mean context costs a micro-batch."""
        workload = self.scenario.workload
        longer = replace(workload, context_tokens=2 * workload.context_tokens)
        more = predict(replace(self.scenario, workload=longer), self.deployment)
        return (more.stages.attn_us - self.prediction.stages.attn_us) / workload.context_tokens

    @property
    def rows_per_micro_batch(self) -> int:
        """On the way of one peer."""
        return self.deployment.rows_per_micro_batch * self.scenario.workload.verify_tokens

    @property
    def load_std_tokens(self) -> float:
        """Of a micro-batch's mean context; requests are independent."""
        return self.context_std_tokens / math.sqrt(self.deployment.requests_per_micro_batch)

    def decode_us(self, num_rows: int) -> float:
        """A run over the rows of one or more whole micro-batches."""
        found = self._mlp_us.get(num_rows)
        if found is None:
            peers = max(round(num_rows / self.rows_per_micro_batch), 1)
            part = replace(self.deployment, attn_gpus=peers * self.num_copies)
            found = self._mlp_us[num_rows] = predict(self.scenario, part).stages.mlp_us
        return found

    def prefill_us(self, num_rows: int) -> float:
        """A run over rows of a prefill; linear between powers of two."""
        return self._between(num_rows, 0)

    def prefill_exchange_us(self, num_rows: int) -> float:
        """One way."""
        return self._between(num_rows, 1)

    def prefill_attn_us(self, num_tokens: int, num_rows: int) -> float:
        """One layer of a part of a prompt; decode's efficiencies, so rather too slow.

        Args:
            num_tokens: Of the whole prompt; a row attends to half of them in the mean.
            num_rows: Of this part.
        """
        scenario = self.scenario
        sizes = (scenario.shape, scenario.gpu, scenario.constants)
        core_us = attention.core_us(
            *sizes, requests=1, context_tokens=num_tokens / 2, verify_tokens=num_rows
        )
        fixed_us = scenario.constants.afd_dense_fixed_us
        return core_us + attention.dense_us(*sizes, tokens=num_rows, fixed_us=fixed_us)

    def _between(self, num_rows: int, which: int) -> float:
        below = 1 << (num_rows.bit_length() - 1)
        low, high = self._at(below)[which], self._at(2 * below)[which]
        return low + (high - low) * (num_rows / below - 1)

    def _at(self, num_rows: int) -> tuple[float, float]:
        found = self._prefill.get(num_rows)
        if found is None:
            workload = replace(self.scenario.workload, verify_tokens=1, accepted_tokens=1.0)
            one = replace(
                self.deployment,
                attn_gpus=self.num_copies,
                micro_batches=1,
                batch_per_attn_gpu=num_rows,
            )
            stages = predict(replace(self.scenario, workload=workload), one).stages
            found = self._prefill[num_rows] = (stages.mlp_us, stages.exchange_us)
        return found


@dataclass(frozen=True)
class _Quiet:
    """Lists that every step without noise shares."""

    attn_us: list[float]
    way_us: list[tuple[float, ...]]


class PlannedServer:
    """Steps of one attention server; each server has draws of its own."""

    def __init__(
        self, table: StageTable, disturbance: Disturbance, num_ranks: int, seed: tuple[int, ...]
    ) -> None:
        if disturbance.prefill_per_step and table.deployment.mode is Mode.CORE_ONLY:
            raise ConfigError("prefill beside core-only attention is not modelled; set it to 0")
        self._table, self._disturbance, self._num_ranks = table, disturbance, num_ranks
        self._rng = np.random.default_rng(seed)
        self._parts = table.deployment.micro_batches
        self._load = self._rng.normal(size=self._parts)
        self._is_prefill_next = False
        self._quiet = self._make_quiet()

    def next_step(self) -> StepPlan:
        """See `ServerCosts`."""
        disturbance, rng = self._disturbance, self._rng
        is_prefill = self._is_prefill_next
        drawn = rng.uniform() < disturbance.prefill_per_step
        self._is_prefill_next = bool(drawn) and not is_prefill
        plan = self._prefill() if is_prefill else self._decode()
        plan.next_is_prefill = self._is_prefill_next
        return plan

    def _make_quiet(self) -> _Quiet:
        stages = self._table.prediction.stages
        num_ops = self._num_layers * self._parts
        return _Quiet([stages.attn_us] * num_ops, [(stages.exchange_us,)] * num_ops)

    @property
    def _num_layers(self) -> int:
        return self._table.scenario.shape.num_moe_layers

    def _decode(self) -> StepPlan:
        table, workload = self._table, self._table.scenario.workload
        num_ops = self._num_layers * self._parts
        return StepPlan(
            is_prefill=False,
            rows=(table.rows_per_micro_batch,) * self._parts,
            tokens=table.deployment.batch_per_attn_gpu * workload.accepted_tokens,
            attn_us=self._attn_us(),
            out_us=self._way_us(table.prediction.stages.exchange_us, num_ops),
            back_us=self._way_us(table.prediction.stages.exchange_us, num_ops),
            outside_us=self._outside_us(),
        )

    def _attn_us(self) -> list[float]:
        disturbance, table = self._disturbance, self._table
        context_std = table.load_std_tokens
        if not (context_std or disturbance.attn_jitter or disturbance.stall_per_step):
            return self._quiet.attn_us
        mean_us = np.full(self._parts, table.prediction.stages.attn_us)
        if context_std:
            memory = disturbance.context_memory
            fresh = self._rng.normal(size=self._parts)
            self._load = memory * self._load + math.sqrt(1 - memory**2) * fresh
            fewest = -table.scenario.workload.context_tokens
            tokens = np.maximum(context_std * self._load, fewest)
            mean_us = mean_us + table.attn_us_per_token * tokens
        attn_us = np.tile(mean_us, self._num_layers)
        attn_us *= self._noise(disturbance.attn_jitter, attn_us.size)
        self._stall(attn_us)
        return [float(value) for value in attn_us]

    def _stall(self, attn_us: Floats) -> None:
        disturbance = self._disturbance
        if disturbance.stall_per_step and self._rng.uniform() < disturbance.stall_per_step:
            shortest_us, longest_us = disturbance.stall_us
            attn_us[self._rng.integers(attn_us.size)] += self._rng.uniform(shortest_us, longest_us)

    def _prefill(self) -> StepPlan:
        table = self._table
        fewest, most = self._disturbance.prefill_tokens
        num_tokens = int(self._rng.integers(fewest, most, endpoint=True))
        rows = [part.num_rows for part in split([num_tokens], self._parts)]
        attn_us = np.tile(
            [table.prefill_attn_us(num_tokens, each) for each in rows], self._num_layers
        )
        attn_us *= self._noise(self._disturbance.attn_jitter, attn_us.size)
        way_us = table.prefill_exchange_us(max(rows))
        return StepPlan(
            is_prefill=True,
            rows=rows,
            tokens=0.0,
            attn_us=[float(value) for value in attn_us],
            out_us=self._way_us(way_us, attn_us.size),
            back_us=self._way_us(way_us, attn_us.size),
            outside_us=self._outside_us(),
        )

    def _outside_us(self) -> float:
        noise = self._noise(self._disturbance.gap_jitter, 1)
        return self._table.prediction.outside_layers_us * float(noise[0])

    def _way_us(self, mean_us: float, num_ops: int) -> Sequence[Sequence[float]]:
        jitter = self._disturbance.exchange_jitter
        if not jitter:
            is_usual = mean_us == self._table.prediction.stages.exchange_us
            if is_usual and num_ops == len(self._quiet.attn_us):
                return self._quiet.way_us
            return [(mean_us,)] * num_ops
        noise = self._noise(jitter, self._num_ranks * num_ops) * mean_us
        ways: list[list[float]] = noise.reshape(num_ops, self._num_ranks).tolist()
        return ways

    def _noise(self, share: float, size: int) -> Floats:
        if not share:
            return np.ones(size)
        return np.maximum(_LEAST, 1 + share * self._rng.normal(size=size))


class PlannedRanks:
    """Runs of the MLP ranks of one group; each rank has draws of its own."""

    def __init__(
        self, table: StageTable, disturbance: Disturbance, num_ranks: int, seed: tuple[int, ...]
    ) -> None:
        self._table, self._jitter = table, disturbance.mlp_jitter
        self._rngs = [np.random.default_rng((*seed, rank)) for rank in range(num_ranks)]
        self._pools: list[list[float]] = [[] for _ in range(num_ranks)]

    def unit_us(self, rank: int, unit: Unit) -> float:
        """See `RankCosts`."""
        table = self._table
        mean_us = (
            table.prefill_us(unit.num_rows) if unit.is_prefill else table.decode_us(unit.num_rows)
        )
        return mean_us * self._noise(rank) if self._jitter else mean_us

    def _noise(self, rank: int) -> float:
        pool = self._pools[rank]
        if not pool:
            noise = 1 + self._jitter * self._rngs[rank].normal(size=_POOL)
            pool = self._pools[rank] = np.maximum(_LEAST, noise).tolist()
        return pool.pop()
