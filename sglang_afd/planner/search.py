"""Searches the best disaggregated and the best colocated deployment of one site."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks
from sglang_afd.planner.deployment import Deployment, ExpertKernels, Mode
from sglang_afd.planner.predict import Prediction
from sglang_afd.planner.shape import ModelShape
from sglang_afd.planner.site import Site

# The router's and the launcher's limit, too.
MICRO_BATCHES = (1, 2, 3, 4)
# Attention GPUs are first tried this far apart; every number between the best and its neighbours
# is tried after that.
_COARSE_RATIO = 1.15
_REFINED_AT_ONCE = 16
# Batches for the front of throughput against time per token, as divisors of the largest.
_BATCH_DIVISORS = (1, 1.4, 2, 3, 6, 16)


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is searched. Throughput counts the GPUs of one deployment; copies fill a larger site."""

    max_gpus: int  # of one deployment, both roles together
    expert_parallel: tuple[int, ...] = ()  # (): every divisor of the number of experts
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    expert_kernels: ExpertKernels = ExpertKernels.GROUPED

    def __post_init__(self) -> None:
        checks.whole("search", "max_gpus", self.max_gpus)
        checks.between("search", "max_gpus", self.max_gpus, 1, 1e6, "Wanted: GPUs.")
        for count in (*self.expert_parallel, *self.micro_batches):
            checks.whole("search", "expert parallelism or micro-batches", count)

    def widths(self, shape: ModelShape) -> list[int]:
        """Expert parallelism to try.

        Raises: ConfigError, when a wanted one does not divide the experts.
        """
        for width in self.expert_parallel:
            if shape.num_experts % width:
                raise ConfigError(
                    f"search: {shape.num_experts} experts of {shape.name} do not divide among "
                    f"{width} GPUs; use a divisor of {shape.num_experts}"
                )
        all_widths = self.expert_parallel or range(1, shape.num_experts + 1)
        return [
            width
            for width in all_widths
            if width <= self.max_gpus and shape.num_experts % width == 0
        ]


@dataclass(frozen=True, kw_only=True)
class Side:
    """All deployments of one kind that fit and keep the limit."""

    best: Prediction | None
    tried: tuple[Prediction, ...]  # those that fit, whatever their time per token
    num_predicted: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """Both sides."""

    colocated: Side
    disaggregated: Side


def search(site: Site, space: Space) -> Found:
    """Both sides.

    Raises: ConfigError, when nothing fits on either side, saying what is short.
    """
    found = Found(
        colocated=search_colocated(site, space),
        disaggregated=search_disaggregated(site, space),
    )
    if not (found.colocated.best or found.disaggregated.best):
        raise ConfigError(_nothing_fits(site, space, found))
    return found


def search_colocated(site: Site, space: Space) -> Side:
    """Every width of expert parallelism, each with its best batch."""
    deployments = [
        Deployment(
            mode=Mode.COLOCATED, attn_gpus=width, expert_parallel=width, batch_per_attn_gpu=1
        )
        for width in space.widths(site.scenario.shape)
    ]
    return _side(site, [point for item in deployments for point in _points(site, item)])


def search_disaggregated(site: Site, space: Space) -> Side:
    """Attention GPUs one by one, expert parallelism, micro-batches and batch.

    More than one copy of the experts is more than one deployment, so the MLP GPUs are as many as
    the expert parallelism is wide.
    """
    points: list[Prediction] = []
    known = [count for count in space.micro_batches if site.scenario.knows_jitter_of(count)]
    if not known:
        raise ConfigError(
            f"search: nothing is known of {min(space.micro_batches)} or more micro-batches with a "
            f"jitter of {site.scenario.jitter:g}; allow 1 or 2 (--micro-batches)"
        )
    for width in space.widths(site.scenario.shape):
        for micro_batches in known:
            points += _ratios(site, space, width, micro_batches)
    return _side(site, points)


def front(points: Iterable[Prediction]) -> list[Prediction]:
    """Those that no other one beats in both tokens/s per GPU and time per token; by time."""
    ordered = sorted(points, key=lambda point: (point.tpot_us, -point.tokens_per_s_per_gpu))
    kept: list[Prediction] = []
    for point in ordered:
        if not kept or point.tokens_per_s_per_gpu > kept[-1].tokens_per_s_per_gpu:
            kept.append(point)
    return kept


def best_batch(site: Site, deployment: Deployment) -> Prediction | None:
    """The deployment with the batch that gives most under memory and limit; None without one."""
    return _best(site, _points(site, deployment, divisors=(1,)))


def _ratios(site: Site, space: Space, width: int, micro_batches: int) -> list[Prediction]:
    def points(attn_gpus: int, divisors: Sequence[float]) -> list[Prediction]:
        deployment = Deployment(
            mode=Mode.AFD,
            attn_gpus=attn_gpus,
            mlp_gpus=width,
            expert_parallel=width,
            micro_batches=micro_batches,
            batch_per_attn_gpu=micro_batches,
            expert_kernels=space.expert_kernels,
        )
        return _points(site, deployment, divisors)

    # Where the link domain ends, a deployment is the last whose rows stay in it.
    edge = site.scenario.gpu.link_domain_gpus - width
    coarse = _coarse(space.max_gpus - width)
    if 1 <= edge <= space.max_gpus - width:
        coarse = sorted({*coarse, edge})
    result = [point for count in coarse for point in points(count, _BATCH_DIVISORS)]
    best = _best(site, result)
    while best:
        tried = {point.deployment.attn_gpus for point in result}
        near = _between_neighbours(best.deployment.attn_gpus, tried)
        if not near:
            break
        result += [point for count in near for point in points(count, (1,))]
        best = _best(site, result)
    return result


def _coarse(most: int) -> list[int]:
    counts: list[int] = []
    count = 1
    while count <= most:
        counts.append(count)
        count = max(count + 1, int(count * _COARSE_RATIO))
    return counts if not counts or counts[-1] == most else [*counts, most]


def _between_neighbours(count: int, tried: set[int]) -> list[int]:
    below = max((other for other in tried if other < count), default=count)
    above = min((other for other in tried if other > count), default=count)
    untried = [other for other in range(below + 1, above) if other != count]
    step = -(-len(untried) // _REFINED_AT_ONCE) or 1
    return untried[::step]


def _points(
    site: Site, deployment: Deployment, divisors: Sequence[float] = _BATCH_DIVISORS
) -> list[Prediction]:
    """Predictions at several batches that fit, the largest that keeps the limit among them."""
    most = site.room(deployment)
    least = deployment.micro_batches
    if most < least:
        return []

    def at(batch: int) -> Prediction:
        return site.predict(deployment.with_batch(batch))

    points = [at(batch) for batch in _batches(site, deployment, most, divisors)]
    limit = site.scenario.workload.max_tpot_us
    if limit is None or all(point.tpot_us <= limit for point in points):
        return points
    slow = min(point.deployment.batch_per_attn_gpu for point in points if point.tpot_us > limit)
    fast = [p.deployment.batch_per_attn_gpu for p in points if p.tpot_us <= limit]
    low = max(fast, default=least - 1)
    while slow - low > 1:
        middle = at((low + slow) // 2)
        points.append(middle)
        if middle.tpot_us <= limit:
            low = middle.deployment.batch_per_attn_gpu
        else:
            slow = middle.deployment.batch_per_attn_gpu
    if low >= least:
        points.append(at(_without_rest(site, deployment, low)))
    return points


def _batches(site: Site, deployment: Deployment, most: int, divisors: Sequence[float]) -> list[int]:
    wanted = {max(int(most / divisor), deployment.micro_batches) for divisor in divisors}
    return sorted(wanted | {_without_rest(site, deployment, batch) for batch in wanted})


def _without_rest(site: Site, deployment: Deployment, batch: int) -> int:
    """The batch, or a smaller one that fills its micro-batches or pieces: a rest costs like one."""
    if deployment.mode is not Mode.COLOCATED:
        return batch - batch % deployment.micro_batches
    piece_tokens = site.scenario.colocated_piece_tokens
    verify_tokens = site.scenario.workload.verify_tokens
    tokens = batch * verify_tokens
    if piece_tokens is None or tokens < max(piece_tokens, verify_tokens):
        return batch
    return max(tokens - tokens % piece_tokens, verify_tokens) // verify_tokens


def _best(site: Site, points: Iterable[Prediction]) -> Prediction | None:
    limit = site.scenario.workload.max_tpot_us
    allowed = [point for point in points if limit is None or point.tpot_us <= limit]

    def rank(point: Prediction) -> tuple[float, int]:
        """Of equals the one with fewer GPUs is better; rounding errors make no difference."""
        return float(f"{site.value(point):.12g}"), -point.deployment.total_gpus

    return max(allowed, key=rank, default=None)


def _side(site: Site, points: Sequence[Prediction]) -> Side:
    return Side(best=_best(site, points), tried=tuple(points), num_predicted=len(points))


def _nothing_fits(site: Site, space: Space, found: Found) -> str:
    scenario = site.scenario
    name, gpus = scenario.shape.name, space.max_gpus
    tried = (*found.colocated.tried, *found.disaggregated.tried)
    limit = scenario.workload.max_tpot_us
    if tried and limit is not None:
        fastest = min(point.tpot_us for point in tried) / 1000
        return (
            f"search: no deployment of {name} on up to {gpus} {scenario.gpu.name} keeps "
            f"{limit / 1000:g} ms a token; the fastest takes {fastest:.1f} ms. Raise --max-tpot"
        )
    experts = scenario.shape.all_expert_bytes / max(space.widths(scenario.shape), default=1)
    need = (scenario.shape.all_dense_bytes + experts) / 1e9
    request = scenario.workload.context_tokens * scenario.shape.kv_bytes_per_token / 1e9
    return (
        f"search: {name} does not fit on up to {gpus} {scenario.gpu.name}: at the widest expert "
        f"parallelism a colocated GPU needs {need:.0f} GB for weights and {request:.1f} GB for the "
        f"cache of one request, and has {scenario.gpu.memory_bytes / 1e9:.0f} GB. Allow more GPUs "
        "(--max-gpus) or larger ones, or shorten the context"
    )
