"""Speed-up of AFD over colocated, as a product of three factors with one cause each."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.errors import ConfigError
from sglang_afd.planner.deployment import Deployment, Mode
from sglang_afd.planner.predict import Prediction, predict
from sglang_afd.planner.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """Each factor is above 1 where it helps; their product is the ratio of tokens/s per GPU."""

    total: float
    batch_gain: float  # the colocated system, if it had room for AFD's batch
    overlap_gain: float  # the same batch, experts behind attention
    disaggregation_cost: float  # share of the GPUs that attend; below 1
    colocated: Prediction
    disaggregated: Prediction


def speed_up(scenario: Scenario, colocated: Deployment, disaggregated: Deployment) -> SpeedUp:
    """Predict both and take the ratio apart at equal batch."""
    if colocated.mode is not Mode.COLOCATED or disaggregated.mode is Mode.COLOCATED:
        raise ConfigError(
            f"speed-up: wanted a colocated and a disaggregated deployment, got {colocated.label} "
            f"and {disaggregated.label}"
        )
    base = predict(scenario, colocated)
    other = predict(scenario, disaggregated)
    same_batch = predict(scenario, colocated.with_batch(disaggregated.batch_per_attn_gpu))
    result = SpeedUp(
        total=other.tokens_per_s_per_gpu / base.tokens_per_s_per_gpu,
        batch_gain=same_batch.tokens_per_s_per_gpu / base.tokens_per_s_per_gpu,
        overlap_gain=same_batch.step_us / other.step_us,
        disaggregation_cost=disaggregated.attn_gpus / disaggregated.total_gpus,
        colocated=base,
        disaggregated=other,
    )
    product = result.batch_gain * result.overlap_gain * result.disaggregation_cost
    assert abs(product - result.total) <= 1e-9 * result.total, (
        f"speed-up {result.total} is not the product {product} of its factors"
    )
    return result
