"""Published closed forms, to check the planner against and for a first guess without a profile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_afd.planner import checks


@dataclass(frozen=True, kw_only=True)
class ColocatedShares:
    """A colocated step in three parts, as a profile of stock kernels gives them."""

    core: float
    dense: float
    moe: float  # with dispatch and combine

    def __post_init__(self) -> None:
        for name in ("core", "dense", "moe"):
            checks.positive("shares", name, getattr(self, name))

    @property
    def total(self) -> float:
        """1 when they are shares."""
        return self.core + self.dense + self.moe


def fastafd_step(shares: ColocatedShares, batch_ratio: float, num_micro_batches: int) -> float:
    """AFD's step in colocated steps, while the experts stay hidden.

    Core attention grows with the batch; the dense rest is paid once per micro-batch.
    Source: FastAFD's model (arXiv 2611.07149) as described by a third-party note.
    """
    core = batch_ratio * shares.core
    return (core + num_micro_batches * shares.dense) / shares.total


def fastafd_speed_up(
    shares: ColocatedShares,
    *,
    batch_ratio: float,
    num_micro_batches: int,
    attn_gpus: int,
    mlp_gpus: int,
) -> float:
    """Tokens/s per GPU over colocated; all GPUs count."""
    step = fastafd_step(shares, batch_ratio, num_micro_batches)
    return batch_ratio * attn_gpus / (attn_gpus + mlp_gpus) / step


def ideal_speed_up_with_free_experts(shares: ColocatedShares) -> float:
    """The bound when the experts cost neither time nor GPUs and the batch stays."""
    return shares.total / (shares.core + shares.dense)


def megascale_step_us(
    attn_us: float, mlp_us: float, exchange_us: float, num_layers: int, num_micro_batches: int
) -> float:
    """Eq. 5 of MegaScale-Infer (arXiv 2504.02263), where the micro-batches hide the exchange."""
    slowest = max(attn_us, mlp_us)
    fill = attn_us + mlp_us + 2 * exchange_us
    return fill + slowest * (num_micro_batches * num_layers - 1)


def megascale_micro_batches(attn_us: float, mlp_us: float, exchange_us: float) -> int:
    """Fewest that keep the slower stage busy: m (slower stage) >= attention + MLP + two exchanges.

    With attention and MLP equally long this is the paper's m >= 2 (1 + exchange / stage).
    """
    slowest = max(attn_us, mlp_us)
    return max(1, math.ceil((attn_us + mlp_us + 2 * exchange_us) / slowest - 1e-9))


@dataclass(frozen=True, kw_only=True)
class LinearStages:
    """Stage times that are linear in what they depend on (arXiv 2601.21351).

    A group is r attention instances and one MLP instance, each instance with a batch of requests.
    """

    attn_us_per_token: float
    attn_fixed_us: float
    exchange_us_per_request: float
    exchange_fixed_us: float
    mlp_us_per_request: float
    mlp_fixed_us: float
    batch: int  # requests of one attention instance
    held_tokens: float  # theta: mean tokens that a request holds

    @property
    def attn_us(self) -> float:
        """Does not depend on the ratio."""
        return self.attn_us_per_token * self.batch * self.held_tokens + self.attn_fixed_us

    @property
    def exchange_us(self) -> float:
        """Of one attention instance."""
        return self.exchange_us_per_request * self.batch + self.exchange_fixed_us

    def mlp_us(self, ratio: float) -> float:
        """Grows with the attention instances that it serves."""
        return self.mlp_us_per_request * ratio * self.batch + self.mlp_fixed_us

    def throughput(self, ratio: float) -> float:
        """Requests per us and instance: r B / ((r + 1) cycle)."""
        cycle = max(self.attn_us, self.exchange_us, self.mlp_us(ratio))
        return ratio * self.batch / ((ratio + 1) * cycle)

    def best_ratio(self) -> float:
        """The closed form: balance with the slower other stage, or the square root if larger."""
        slope = self.mlp_us_per_request * self.batch
        return max(
            (self.attn_us - self.mlp_fixed_us) / slope,
            (self.exchange_us - self.mlp_fixed_us) / slope,
            math.sqrt(self.mlp_fixed_us / slope),
        )
