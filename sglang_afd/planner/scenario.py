"""Scenario: everything about a prediction but the deployment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks
from sglang_afd.planner.constants import DEFAULTS, Constants
from sglang_afd.planner.deployment import Deployment, Workload
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.memory import USABLE_FRACTION
from sglang_afd.planner.routing import Routing, skewed_routing
from sglang_afd.planner.shape import ModelShape

# Up to here the closed form was compared with simulations (benchmark/bench_simulator.py). With 3 or
# 4 micro-batches those under way hide a late one, which the form leaves out.
MOST_JITTER = 0.2
MOST_JITTER_OF_MANY = 0.05


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything about a prediction but the deployment."""

    shape: ModelShape
    gpu: Gpu
    workload: Workload
    constants: Constants = DEFAULTS
    routing: Routing | None = None  # None: from constants.routing_skew
    usable_memory_fraction: float = USABLE_FRACTION
    # Tokens of a rank that a colocated system runs through its experts at once. None: any number,
    # as SGLang does; its dispatch buffers bound the batch of a GPU, they do not cut it.
    colocated_piece_tokens: int | None = None
    # Standard deviation of a GPU's time for the attention of a layer, over its mean, from layer to
    # layer and from GPU to GPU. The others wait for the slowest one, colocated ones as well.
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.routing and len(self.routing.probabilities) != self.shape.num_experts:
            raise ConfigError(
                f"routing: {len(self.routing.probabilities)} experts, model {self.shape.name} has "
                f"{self.shape.num_experts}"
            )
        if not 0 < self.usable_memory_fraction <= 1:
            raise ConfigError(
                f"usable_memory_fraction is {self.usable_memory_fraction}; wanted above 0 and "
                "at most 1"
            )
        if self.colocated_piece_tokens is not None:
            checks.whole("scenario", "colocated_piece_tokens", self.colocated_piece_tokens)
        checks.not_negative("scenario", "jitter", self.jitter)
        if self.jitter > MOST_JITTER:
            raise ConfigError(
                f"scenario: jitter is {self.jitter:g}; wanted at most {MOST_JITTER:g}, as 5 % is "
                "0.05. Beyond it the closed form is not checked: `simulate --attn-jitter` plays it"
            )

    def knows_jitter_of(self, micro_batches: int) -> bool:
        """Whether this many micro-batches were checked under so much jitter."""
        return micro_batches <= 2 or self.jitter <= MOST_JITTER_OF_MANY

    def with_constants(self, constants: Constants) -> Scenario:
        """The same scenario with other constants."""
        return replace(self, constants=constants)

    def effective_routing(self) -> Routing:
        """As measured, or of the fitted skew."""
        if self.routing:
            return self.routing
        shape = self.shape
        return skewed_routing(
            shape.num_experts, shape.experts_per_token, self.constants.routing_skew
        )


def check_experts(shape: ModelShape, deployment: Deployment) -> None:
    """Raises: ConfigError, when the experts do not divide among their GPUs."""
    if shape.num_experts % deployment.expert_parallel:
        raise ConfigError(
            f"deployment {deployment.label}: {shape.num_experts} experts of {shape.name} do not "
            f"divide among {deployment.expert_parallel} GPUs; use a divisor of {shape.num_experts}"
        )


def check_jitter(scenario: Scenario, deployment: Deployment) -> None:
    """Raises: ConfigError, when the closed form is not known to hold."""
    if not scenario.knows_jitter_of(deployment.micro_batches):
        raise ConfigError(
            f"deployment {deployment.label}: the closed form knows a jitter of "
            f"{scenario.jitter:g} for 1 and 2 micro-batches only, and one of up to "
            f"{MOST_JITTER_OF_MANY:g} for more; `simulate --attn-jitter` plays any"
        )
