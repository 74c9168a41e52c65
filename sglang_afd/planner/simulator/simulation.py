"""simulate: plays every group of a deployment and sums up."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks
from sglang_afd.planner.deployment import Deployment
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.simulator.accounts import Account
from sglang_afd.planner.simulator.disturbance import QUIET, Disturbance, Failure, Lost
from sglang_afd.planner.simulator.group import Group, GroupOptions
from sglang_afd.planner.simulator.planned import PlannedRanks, PlannedServer, StageTable
from sglang_afd.planner.simulator.result import Simulated, times_of
from sglang_afd.planner.simulator.server import Counts, Server, Step
from sglang_afd.planner.simulator.timeline import Span
from sglang_afd.rounds.arrival import ArrivalQueue
from sglang_afd.rounds.rounds import Rounds
from sglang_afd.rounds.units import UnitSource

_STARTS, _RANKS = 10_001, 10_002  # keep their draws apart from those of servers


_MOST = {"num_steps": 10**6, "warm_steps": 10**6, "instances": 10**4, "num_processes": 1024}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How long, and how."""

    num_steps: int = 20  # decode steps that are measured, of every server
    warm_steps: int = 3  # before; the first rounds have not found together yet
    seed: int = 1
    instances: int = 1  # of the deployment, each with its own copies of the experts
    has_rounds: bool = True  # False: first come, first served, as SGLANG_AFD_ROUNDS=off
    is_literal: bool = False  # see GroupOptions
    num_processes: int = 1  # groups are played side by side; the result is the same
    span: Span | None = None  # steps whose intervals are kept

    def __post_init__(self) -> None:
        for name in ("num_steps", "instances", "num_processes"):
            checks.whole("simulation", name, getattr(self, name))
        for name in ("warm_steps", "seed"):
            checks.not_negative("simulation", name, getattr(self, name))
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ConfigError(
                    f"simulation: {name} is {getattr(self, name)}, which would never end; wanted "
                    f"at most {most}"
                )


def simulate(
    scenario: Scenario,
    deployment: Deployment,
    disturbance: Disturbance = QUIET,
    options: Options | None = None,
) -> Simulated:
    """Play every group of every instance.

    Args:
        scenario: As for `predict`; its spread of contexts is drawn, not averaged.
        deployment: Disaggregated. Each GPU is a server or a rank of its own; each copy of the
            experts makes a group with its share of the attention servers.
        disturbance: What is drawn over the predicted stage times.
        options: Length, seed, instances.
    Raises: ConfigError.
    """
    options = options or Options()
    table = StageTable(scenario, deployment)
    sizes = group_sizes(deployment) * options.instances
    _check_failures(disturbance.failures, sizes, deployment.expert_parallel)
    play = partial(_play, table, disturbance, options)
    if options.num_processes > 1 and len(sizes) > 1:
        with ProcessPoolExecutor(min(options.num_processes, len(sizes))) as pool:
            groups = list(pool.map(play, range(len(sizes)), sizes))
    else:
        groups = [play(number, size) for number, size in enumerate(sizes)]
    gpus = deployment.total_gpus * options.instances
    return summarize(groups, options.warm_steps, gpus, scenario.workload.accepted_tokens)


def _play(
    table: StageTable, disturbance: Disturbance, options: Options, number: int, size: int
) -> Group:
    group = _make_group(table, disturbance, options, number, size)
    starts_us = _starts_us(table, disturbance, options, number, size)
    was_enabled = gc.isenabled()
    gc.disable()  # a tenth of the time, and nothing here is in a cycle
    try:
        group.play(starts_us)
    finally:
        if was_enabled:
            gc.enable()
    return group


def _first_come(layer_ids: Sequence[int]) -> UnitSource:
    return ArrivalQueue()


def group_sizes(deployment: Deployment) -> list[int]:
    """Attention servers of each copy of the experts, as equal as they can be."""
    copies = deployment.mlp_gpus // deployment.expert_parallel
    if not copies:
        return []
    least, more = divmod(deployment.attn_gpus, copies)
    if not least:
        raise ConfigError(
            f"deployment {deployment.label}: {copies} copies of the experts and "
            f"{deployment.attn_gpus} attention GPUs; a copy without any would be idle"
        )
    return [least + (number < more) for number in range(copies)]


def _check_failures(failures: Sequence[Failure], sizes: Sequence[int], num_ranks: int) -> None:
    for failure in failures:
        if failure.group >= len(sizes):
            raise ConfigError(f"failure in group {failure.group}: there are {len(sizes)}, from 0")
        number = num_ranks if failure.lost is Lost.MLP else sizes[failure.group]
        if failure.index >= number:
            raise ConfigError(
                f"failure of {failure.lost.value} {failure.index} in group {failure.group}: it has "
                f"{number}, from 0"
            )


def _make_group(
    table: StageTable, disturbance: Disturbance, options: Options, number: int, size: int
) -> Group:
    num_ranks, seed = table.deployment.expert_parallel, (options.seed, number)
    servers = [
        Server(
            number=index,
            num_layers=table.scenario.shape.num_moe_layers,
            costs=PlannedServer(table, disturbance, num_ranks, (*seed, index)),
            warm_steps=options.warm_steps,
        )
        for index in range(size)
    ]
    span = options.span
    return Group(
        costs=PlannedRanks(table, disturbance, num_ranks, (*seed, _RANKS)),
        servers=servers,
        options=GroupOptions(
            make_source=Rounds if options.has_rounds else _first_come,
            num_ranks=num_ranks,
            num_steps=options.warm_steps + options.num_steps,
            is_literal=options.is_literal,
            span=span if span is not None and span.group == number else None,
            notice_us=disturbance.notice_us,
        ),
        failures=[each for each in enumerate(disturbance.failures) if each[1].group == number],
    )


def _starts_us(
    table: StageTable, disturbance: Disturbance, options: Options, number: int, size: int
) -> list[float]:
    rng = np.random.default_rng((options.seed, number, _STARTS))
    latest_us = disturbance.start_spread * table.prediction.step_us
    return [float(start_us) for start_us in rng.uniform(0, latest_us, size)]


def summarize(
    groups: Sequence[Group], warm_steps: int, num_gpus: int, accepted_tokens: float = 1.0
) -> Simulated:
    """One result of all groups."""
    servers = [server for group in groups for server in group.servers]
    end_us = max(group.now_us for group in groups)
    for group in groups:
        if group.is_stuck:
            for server in group.servers:
                server.stand_still(end_us)
    steps_us = [_steps_us(server, warm_steps) for server in servers]
    account = Account(servers[0].num_layers)
    for server in servers:
        account.add(server.account)
    shares = account.shares()
    busy = [share for group in groups for share in group.busy_shares()]
    counters = [group.counters for group in groups]
    rates = [
        _rate(server, warm_steps, end_us, is_stuck=group.is_stuck)
        for group in groups
        for server in group.servers
    ]
    everything = [each for group in steps_us for each in group]
    step = times_of(everything)
    return Simulated(
        step=step,
        prefill=times_of(
            [
                step.ended_us - step.began_us
                for server in servers
                for step in server.steps
                if step.is_prefill
            ]
        ),
        tokens_per_s_per_gpu=sum(rates) * 1e6 / num_gpus,
        tpot_us=step.mean_us / accepted_tokens,
        attn_busy=shares.attention,
        mlp_busy=float(np.mean(busy)),
        shares=shares,
        peers_per_run=sum(group.num_unit_peers for group in groups)
        / max(1, sum(group.num_units for group in groups)),
        parked=sum(each.split for each in counters),
        exchanges=Counts(
            **{
                name: sum(getattr(server.counts, name) for server in servers)
                for name in ("sent", "answered", "lost", "resent")
            }
        ),
        num_servers=len(servers),
        num_ranks=len(busy),
        num_groups=len(groups),
        num_stuck_groups=sum(group.is_stuck for group in groups),
        num_events=sum(group.num_events for group in groups),
        intervals=tuple(
            interval
            for group in groups
            for intervals in (*(server.intervals for server in group.servers), group.intervals)
            for interval in intervals
        ),
        steps_us=tuple(tuple(each) for each in steps_us),
    )


def _ends(server: Server, warm_steps: int) -> list[Step]:
    """Decode steps from the last one that warms up."""
    decode = [step for step in server.steps if not step.is_prefill]
    return decode[max(warm_steps - 1, 0) :]


def _steps_us(server: Server, warm_steps: int) -> list[float]:
    ends = _ends(server, warm_steps)
    return [after.ended_us - before.ended_us for before, after in zip(ends, ends[1:], strict=False)]


def _rate(server: Server, warm_steps: int, end_us: float, *, is_stuck: bool) -> float:
    """Tokens per us between the end of the steps that warm up and the last end.

    A server that does nothing any more has its share of the time until the simulation's end.
    """
    ends = _ends(server, warm_steps)
    if len(ends) < 2:
        return 0.0
    last_us = ends[-1].ended_us if server.is_alive and not is_stuck else end_us
    return sum(end.tokens for end in ends[1:]) / (last_us - ends[0].ended_us)
