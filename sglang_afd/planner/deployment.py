"""Deployment and Workload: what a prediction is for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks


class Mode(Enum):
    """Who computes what."""

    COLOCATED = "colocated"  # every GPU attends and owns a share of the experts
    AFD = "afd"  # attention GPUs keep everything but the routed experts
    CORE_ONLY = "core_only"  # attention GPUs keep the cache and core attention only


class ExpertKernels(Enum):
    """How a disaggregated MLP side computes."""

    FUSED = "fused"  # one persistent kernel: exchange, both projections, exchange (MegaMoE)
    GROUPED = "grouped"  # the colocated system's grouped GEMMs and its exchange kernels


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Decode in steady state: every slot of the batch is taken."""

    context_tokens: float  # mean tokens held by a request; theta of barrier.py for a trace
    context_std_tokens: float = 0.0  # between requests; the slowest peer is waited for
    verify_tokens: int = 1  # new tokens of a request per step; above 1 for speculation
    accepted_tokens: float = 1.0  # mean tokens that a step yields per request
    max_tpot_us: float | None = None  # limit on the time per output token

    def __post_init__(self) -> None:
        hint = "Wanted: tokens."
        checks.between("workload", "context_tokens", self.context_tokens, 1, 1e8, hint)
        checks.not_negative("workload", "context_std_tokens", self.context_std_tokens)
        checks.whole("workload", "verify_tokens", self.verify_tokens)
        checks.positive("workload", "accepted_tokens", self.accepted_tokens)
        if self.accepted_tokens < 1:
            raise ConfigError(
                f"workload: {self.accepted_tokens:g} tokens accepted in a step; a step yields one "
                "even when every guess was wrong, so wanted 1 or more"
            )
        if self.accepted_tokens > self.verify_tokens:
            raise ConfigError(
                f"workload: {self.accepted_tokens:g} tokens accepted of {self.verify_tokens} "
                "verified in a step; raise verify_tokens or lower accepted_tokens"
            )
        if self.max_tpot_us is not None:
            hint = "Wanted: microseconds, 50 ms is 50000."
            checks.between("workload", "max_tpot_us", self.max_tpot_us, 500, 1e8, hint)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One instance. Colocated GPUs are counted as attention GPUs."""

    mode: Mode
    attn_gpus: int
    mlp_gpus: int = 0
    expert_parallel: int  # GPUs that share one copy of the experts
    micro_batches: int = 1
    batch_per_attn_gpu: int
    expert_kernels: ExpertKernels = ExpertKernels.FUSED  # of a disaggregated deployment

    def __post_init__(self) -> None:
        owner = f"deployment {self.label}"
        for name in ("attn_gpus", "expert_parallel", "micro_batches", "batch_per_attn_gpu"):
            checks.whole(owner, name, getattr(self, name))
        if self.mode is Mode.COLOCATED:
            self._check_colocated(owner)
            return
        checks.whole(owner, "mlp_gpus", self.mlp_gpus)
        if self.mlp_gpus % self.expert_parallel:
            raise ConfigError(
                f"{owner}: {self.mlp_gpus} MLP GPUs do not split into copies of the experts on "
                f"{self.expert_parallel} GPUs each; make one a multiple of the other"
            )
        if self.micro_batches > self.batch_per_attn_gpu:
            raise ConfigError(
                f"{owner}: {self.micro_batches} micro-batches of {self.batch_per_attn_gpu} "
                "requests; a micro-batch needs at least one"
            )

    def _check_colocated(self, owner: str) -> None:
        if self.mlp_gpus or self.micro_batches != 1:
            raise ConfigError(
                f"{owner}: a colocated deployment has no MLP GPUs and one micro-batch; got "
                f"{self.mlp_gpus} and {self.micro_batches}"
            )
        if self.attn_gpus % self.expert_parallel:
            raise ConfigError(
                f"{owner}: {self.attn_gpus} GPUs do not split into copies of the experts on "
                f"{self.expert_parallel} GPUs each; make one a multiple of the other"
            )

    @property
    def label(self) -> str:
        """Short, for messages and tables."""
        if self.mode is Mode.COLOCATED:
            return f"EP{self.expert_parallel} x {self.attn_gpus} GPUs"
        return f"{self.attn_gpus}A{self.mlp_gpus}F EP{self.expert_parallel} m{self.micro_batches}"

    @property
    def total_gpus(self) -> int:
        """Of both roles."""
        return self.attn_gpus + self.mlp_gpus

    @property
    def requests_per_micro_batch(self) -> float:
        """The mean: a step reads each request's cache once, however they are split."""
        return self.batch_per_attn_gpu / self.micro_batches

    @property
    def rows_per_micro_batch(self) -> int:
        """Of the largest micro-batch, to which the others are padded."""
        return -(-self.batch_per_attn_gpu // self.micro_batches)

    @property
    def peers_per_expert_copy(self) -> float:
        """Attention GPUs whose rows meet in one copy of the experts."""
        if self.mode is Mode.COLOCATED:
            return self.expert_parallel
        return self.attn_gpus * self.expert_parallel / self.mlp_gpus

    def with_batch(self, batch_per_attn_gpu: int) -> Deployment:
        """The same deployment at another batch."""
        return replace(self, batch_per_attn_gpu=batch_per_attn_gpu)
