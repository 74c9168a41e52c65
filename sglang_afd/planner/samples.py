"""What a profile holds beside its measurements: calls of the experts, whole steps, memory."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.errors import ConfigError
from sglang_afd.planner.deployment import Deployment, Mode
from sglang_afd.planner.fit import ROW_NOISE
from sglang_afd.planner.routing import Routing
from sglang_afd.planner.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class ExpertSample:
    """The experts of one layer, called with tokens whose experts were drawn from a few."""

    tokens: int
    experts_offered: int  # a token chooses among these, each as likely as the others
    experts_hit: float
    time_us: float
    noise: float = ROW_NOISE  # standard deviation of the logarithm

    def routing(self, shape: ModelShape) -> Routing:
        """The probabilities that the choices were drawn from."""
        offered = self.experts_offered
        if not shape.experts_per_token <= offered <= shape.num_experts:
            raise ConfigError(
                f"expert sample: {offered} experts offered for top-{shape.experts_per_token} of "
                f"{shape.num_experts}; measure the profile again"
            )
        share = min(shape.experts_per_token / offered, 1 - 1e-12)
        return Routing((share,) * offered + (0.0,) * (shape.num_experts - offered))

    @property
    def deployment(self) -> Deployment:
        """One GPU with all experts."""
        return one_gpu(self.tokens)


@dataclass(frozen=True, kw_only=True)
class StepSample:
    """Where the time of one colocated decode step goes; for people, and for checks."""

    batch: int
    context_tokens: float
    step_us: float  # from step to step, each launched while the one before runs
    block_medians_us: tuple[float, ...]
    alone_us: float  # wall clock, the device idle before and after
    stages_us: dict[str, float]  # of the whole step: core, dense, experts, exchange, outside
    host_gap_us: float  # what the host adds to `alone_us` beyond all stages
    unmatched_share: float  # of the stages' time, in kernels that no name pattern matches


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Of the device, with the model loaded."""

    total_bytes: float
    weight_bytes: float
    kv_bytes_per_token: float
    kv_pool_tokens: int
    other_bytes: float  # graphs, activations, the runtime; 0 where nobody tells


def one_gpu(batch: int) -> Deployment:
    """Colocated, with all experts: what is profiled."""
    return Deployment(mode=Mode.COLOCATED, attn_gpus=1, expert_parallel=1, batch_per_attn_gpu=batch)
