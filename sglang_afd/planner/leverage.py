"""How much throughput an error of the step costs where a limit on the time per token binds."""

from __future__ import annotations

import math

from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.site import Site

# Between batches this far apart, as a share of the batch, the step's growth is taken.
_REACH = 4


def leverage(site: Site, prediction: Prediction, error: float) -> float:
    """Relative change of throughput over that of the step which causes it.

    1 at a given batch. At the limit a step that is 1 % slower than predicted has to be made up by a
    smaller batch, which costs 1 % over the elasticity of the step by the batch: three times as much
    where the fixed parts are two thirds of the step. In between, of an error of this size.

    Args:
        site: Where the deployment is.
        prediction: Of it, at a batch that keeps the limit.
        error: Of the step, relative, above 0.
    """
    limit_us = site.scenario.workload.max_tpot_us
    if limit_us is None:
        return 1.0
    deployment = prediction.deployment
    one_more = site.predict(deployment.with_batch(deployment.batch_per_attn_gpu + 1))
    free = min(max(math.log(limit_us / one_more.tpot_us), 0.0), error)
    return (free + (error - free) / _elasticity(site, prediction)) / error


def _elasticity(site: Site, prediction: Prediction) -> float:
    """Of the step by the batch, in logarithms; 1 for a step without fixed parts."""
    deployment = prediction.deployment
    batch, unit = deployment.batch_per_attn_gpu, deployment.micro_batches
    reach = max(batch // _REACH // unit, 1) * unit
    fewer, more = max(batch - reach, unit), batch + reach
    steps = [site.predict(deployment.with_batch(number)).step_us for number in (fewer, more)]
    return min(max(math.log(steps[1] / steps[0]) / math.log(more / fewer), 0.01), 1.0)
