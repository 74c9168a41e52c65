"""What servers on GPUs get besides their own flags: a GPU, its memory, and MPS where they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sglang_afd.errors import ConfigError
from sglang_afd.fleet.config import LaunchConfig
from sglang_afd.fleet.console import Console
from sglang_afd.fleet.flags import Flags
from sglang_afd.fleet.gpus import Gpu, Gpus
from sglang_afd.fleet.memory import MemoryPlan, MemoryPlanner
from sglang_afd.fleet.model_size import model_size
from sglang_afd.fleet.mps import NOWHERE, SHARE_VARIABLE, Mps, private_mps
from sglang_afd.fleet.placement import Placement, place

# Key-value cache of an attention server that shares a GPU whose memory is not known.
FALLBACK_TOKENS = 65536
WITHOUT_MPS = (
    "servers that share a GPU take turns: kernels of two of them never run at once, and a "
    "hand-over of rows takes about 9 us instead of 3 (as measured on an H200)"
)


@dataclass(frozen=True, kw_only=True)
class OnGpus:
    """By the server's name; empty on a machine without GPUs."""

    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    memory: MemoryPlan = field(default_factory=lambda: MemoryPlan(servers={}))


@contextmanager
def on_gpus(
    config: LaunchConfig, model_path: Path, visible: Gpus, console: Console
) -> Iterator[OnGpus]:
    """Place the servers, plan their memory, and run MPS for as long as the `with` block does.

    Raises:
        ConfigError: A GPU that is not there, too little memory, or SM shares that nothing reads.
    """
    gpus = visible.choose(config.gpus)
    if not gpus:
        _refuse_without(config, "there is no GPU")
        yield OnGpus()
        return
    placement = place(attn=config.attn, mlp=config.mlp, spares=config.spares, gpus=gpus)
    for line in placement.describe():
        console.progress(line)
    if not placement.is_shared:
        _refuse_without(config, "no two servers share a GPU")
    wants_mps = placement.is_shared and not config.no_mps
    memory = _plan_memory(config, model_path, visible, placement, wants_mps, console)
    with _sharing(config, placement, console) as mps:
        names = placement.index_of
        yield OnGpus(
            flags={name: _flags(name, config.mlp, placement, memory, mps) for name in names},
            environment={name: _environment(name, config, gpus, mps) for name in names},
            memory=memory,
        )


def _plan_memory(
    config: LaunchConfig,
    model_path: Path,
    visible: Gpus,
    placement: Placement,
    has_mps: bool,
    console: Console,
) -> MemoryPlan:
    attn_flags = Flags(argv=(*config.server_args, *config.attn_args))
    if visible.problem:
        console.progress(f"GPU memory is not planned: {visible.problem}")
        return MemoryPlan(servers={})
    try:
        model = model_size(model_path, attn_flags)
    except ConfigError as error:
        console.progress(f"GPU memory is not planned: {error}")
        return MemoryPlan(servers={})
    plan = MemoryPlanner(
        model=model,
        placement=placement,
        num_ranks=config.mlp,
        attn_flags=attn_flags,
        mlp_flags=Flags(argv=(*config.server_args, *config.mlp_args)),
        has_mps=has_mps,
    ).plan()
    for server in plan.servers.values():
        console.progress(f"planned memory: {server.describe()}")
    return plan


@contextmanager
def _sharing(config: LaunchConfig, placement: Placement, console: Console) -> Iterator[Mps | None]:
    """MPS, or why there is none; None where no GPU is shared."""
    if not placement.is_shared:
        yield None
        return
    if config.no_mps:
        _refuse_without(config, "--no-mps is given")
        console.progress(f"no MPS (--no-mps): {WITHOUT_MPS}")
        yield Mps(environment=None)
        return
    ids = [placement.gpus[index].id for index in sorted(set(placement.index_of.values()))]
    with private_mps(ids if _are_uuids(placement.gpus) else ()) as mps:
        if mps.environment is None:
            console.progress(f"no MPS ({mps.reason}): {WITHOUT_MPS}")
            _refuse_without(config, "there is no MPS")
        elif mps.is_private:
            console.progress(f"started an MPS daemon for this launch in {mps.directory}")
        else:
            console.progress("using the MPS daemon that runs already; it is left running")
        yield mps
    for problem in mps.problems:
        console.progress(problem)
    if mps.environment is not None and mps.is_private and not mps.problems:
        console.progress("stopped the MPS daemon")


def _flags(
    name: str, num_ranks: int, placement: Placement, memory: MemoryPlan, mps: Mps | None
) -> list[str]:
    flags = ["--base-gpu-id", str(placement.index_of[name])]
    if mps is not None:
        flags += ["--afd-wait-policy", "memop" if mps.environment is None else "poll"]
    planned = memory.flags_of(name)
    is_shared = bool(placement.others_on(name))
    if not planned and is_shared and name.startswith("attn"):
        planned = ("--max-total-tokens", str(FALLBACK_TOKENS))
    if name.startswith("attn"):  # with one rank no kernel has to add
        planned = (*planned, "--afd-max-mlp-ranks", str(num_ranks))
    return [*flags, *planned]


def _environment(
    name: str, config: LaunchConfig, gpus: Sequence[Gpu], mps: Mps | None
) -> dict[str, str]:
    environment: dict[str, str] = {}
    if _are_uuids(gpus) or config.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.id for gpu in gpus)
    if mps is None:
        return environment
    if mps.environment is None:
        # So that the servers do not find a daemon which the user did not want, or which failed.
        return environment | NOWHERE
    environment |= mps.environment
    share = dict(config.sm_share).get(name.partition("-")[0])
    if share is not None:
        environment[SHARE_VARIABLE] = str(share)
    return environment


def _are_uuids(gpus: Sequence[Gpu]) -> bool:
    return all(gpu.id.startswith(("GPU-", "MIG-")) for gpu in gpus)


def _refuse_without(config: LaunchConfig, why: str) -> None:
    if config.sm_share:
        raise ConfigError(f"--sm-share has no effect here: {why}; leave it out")
