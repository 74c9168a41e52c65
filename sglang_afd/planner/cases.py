"""What if: the same question under one other assumption at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang_afd.errors import ConfigError
from sglang_afd.planner.answer import Answered, compare, of_one_side
from sglang_afd.planner.deployment import ExpertKernels, Workload
from sglang_afd.planner.fit import Fit
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.search import Found, Space, search_colocated, search_disaggregated
from sglang_afd.planner.site import Site


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    site: Site  # of the disaggregated deployment
    base_sites: tuple[Site, ...]  # of colocated ones; the best of all of them counts
    space: Space
    model_noise: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the case gives; a reason instead, when it cannot be."""

    case: Case
    answered: Answered | None
    value: float  # tokens/s per cost of the best disaggregated deployment
    base_value: float
    reason: str = ""


def kernels_case(base: Case) -> Case:
    """The other kind of expert kernels."""
    fused = base.space.expert_kernels is ExpertKernels.FUSED
    other = ExpertKernels.GROUPED if fused else ExpertKernels.FUSED
    return replace(
        base, name=f"{other.value} expert kernels", space=replace(base.space, expert_kernels=other)
    )


def context_case(base: Case, context_tokens: float) -> Case:
    """Longer or shorter requests; their deviation grows along."""
    workload = base.site.scenario.workload
    factor = context_tokens / workload.context_tokens
    changed = replace(
        workload,
        context_tokens=context_tokens,
        context_std_tokens=workload.context_std_tokens * factor,
    )
    return _with_workload(base, f"context {context_tokens:.0f}", changed)


def speculation_case(base: Case, verify_tokens: int, accepted_tokens: float) -> Case:
    """So many tokens verified in a step, so many of them kept on average."""
    workload = replace(
        base.site.scenario.workload, verify_tokens=verify_tokens, accepted_tokens=accepted_tokens
    )
    return _with_workload(base, f"verify {verify_tokens}, accept {accepted_tokens:g}", workload)


def free_experts_case(base: Case) -> Case:
    """Experts in SRAM accelerators that take no time and are not counted."""
    return replace(
        base,
        name="experts in SRAM, free",
        site=replace(base.site, has_free_experts=True, mlp_gpu=None),
        space=replace(base.space, expert_parallel=(1,)),
    )


def gpu_case(base: Case, gpu: Gpu, price: float, model_noise: float) -> Case:
    """Everything on another GPU type."""
    site = _on(base.site.scenario, gpu, price)
    return replace(
        base, name=f"all on {gpu.name}", site=site, base_sites=(site,), model_noise=model_noise
    )


def two_types_case(
    base: Case, attn: tuple[Gpu, float], mlp: tuple[Gpu, float], model_noise: float
) -> Case:
    """A GPU type and its price for each role, against colocated on either."""
    scenario = base.site.scenario
    site = replace(_on(scenario, *attn), mlp_gpu=mlp[0], mlp_price=mlp[1])
    return replace(
        base,
        name=f"{attn[0].name} attends, {mlp[0].name} has experts",
        site=site,
        base_sites=(_on(scenario, *attn), _on(scenario, *mlp)),
        model_noise=model_noise,
    )


def outcome(fitted: Fit, case: Case) -> Outcome:
    """Search the case; what cannot be is a reason, not an error."""
    try:
        disaggregated = search_disaggregated(case.site, case.space)
        base_space = replace(case.space, expert_parallel=())
        sides = [(site, search_colocated(site, base_space)) for site in case.base_sites]
    except ConfigError as error:
        return Outcome(case=case, answered=None, value=0.0, base_value=0.0, reason=str(error))

    def value(site: Site, best: Prediction | None) -> float:
        return 0.0 if best is None else site.value(best)

    base_site, colocated = max(sides, key=lambda pair: value(pair[0], pair[1].best))
    found = Found(colocated=colocated, disaggregated=disaggregated)
    verdict = None
    if colocated.best is None and disaggregated.best is None:
        reason = f"nothing fits on up to {case.space.max_gpus} GPUs within the limits"
        return Outcome(case=case, answered=None, value=0.0, base_value=0.0, reason=reason)
    if colocated.best is None or disaggregated.best is None:
        found_answer = of_one_side(fitted, sides, (case.site, disaggregated), case.model_noise)
    else:
        verdict = compare(
            fitted,
            case.site,
            colocated.best,
            disaggregated.best,
            model_noise=case.model_noise,
            colocated_site=base_site,
        )
        found_answer = verdict.answer
    return Outcome(
        case=case,
        answered=Answered(found=found, answer=found_answer, verdict=verdict),
        value=value(case.site, disaggregated.best),
        base_value=value(base_site, colocated.best),
    )


def outcomes(fitted: Fit, cases: Sequence[Case]) -> list[Outcome]:
    """In order."""
    return [outcome(fitted, case) for case in cases]


def _on(scenario: Scenario, gpu: Gpu, price: float) -> Site:
    return Site(scenario=replace(scenario, gpu=gpu), attn_price=price, mlp_price=price)


def _with_workload(base: Case, name: str, workload: Workload) -> Case:
    def changed(site: Site) -> Site:
        return replace(site, scenario=replace(site.scenario, workload=workload))

    return replace(
        base,
        name=name,
        site=changed(base.site),
        base_sites=tuple(changed(site) for site in base.base_sites),
    )
