"""Statistics of steps and blocks, and the JSON line that is made of them (pure)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from step.cases import Case

# Share of the experts, on average over the layers; below it routing may have collapsed. Even
# routing of 64 rows, 8 choices each among 128 experts, touches 98 %, and 94.5 % in some layer.
LEAST_TOUCHED = 0.95


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """Decode steps of one server in one block."""

    step_ms: list[float]  # from before the step to when the device is idle again
    device_ms: list[float]  # between CUDA events; empty on a CPU
    stream_ms: float  # of a step when the next one is launched while it runs
    touched: list[list[int]]  # of each MoE layer, experts that got a row in one more step


@dataclass(frozen=True, kw_only=True)
class BlockRun:
    """One case in one block."""

    peers: list[PeerRun]
    mlp: dict[str, float] = field(default_factory=dict)  # what the MLP ranks counted meanwhile

    @property
    def step_ms(self) -> list[float]:
        """Of every server."""
        return [ms for peer in self.peers for ms in peer.step_ms]


@dataclass(frozen=True, kw_only=True)
class Touched:
    """Share of a layer's experts with at least one row in a decode step."""

    least: float
    mean: float


def touched_share(blocks: Sequence[BlockRun], num_experts: int) -> Touched | None:
    """Over the layers, of the block where it was least; None where it was not counted."""
    shares = []
    for block in blocks:
        layers = zip(*(peer.touched for peer in block.peers), strict=True)
        of_layers = [len(set().union(*layer)) / num_experts for layer in layers]
        if of_layers:
            shares.append(Touched(least=min(of_layers), mean=statistics.mean(of_layers)))
    return min(shares, key=lambda share: share.mean) if shares else None


def spread(blocks: Sequence[BlockRun]) -> dict[str, Any]:
    """How the medians of the blocks and the single steps differ, in ms."""
    medians = [statistics.median(block.step_ms) for block in blocks]
    steps = [ms for block in blocks for ms in block.step_ms]
    return {
        "block_medians_ms": [_round(ms) for ms in medians],
        "iqr_ms": _round(interquartile_range(medians)),
        "min_ms": _round(min(steps)),
        "max_ms": _round(max(steps)),
    }


def interquartile_range(values: Sequence[float]) -> float:
    """0 for a single value."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def median_step_ms(blocks: Sequence[BlockRun]) -> float:
    """Over all steps of all blocks and servers."""
    return statistics.median(ms for block in blocks for ms in block.step_ms)


def line_of(
    case: Case,
    colocated: Sequence[BlockRun],
    afd: Sequence[BlockRun],
    *,
    num_experts: int,
    logits: dict[str, Any] | None,
) -> dict[str, Any]:
    """The fields of one case; `valid` says whether the ratio may be quoted."""
    colocated_ms, afd_ms = median_step_ms(colocated), median_step_ms(afd)
    touched = {"colocated": touched_share(colocated, num_experts)}
    touched["afd"] = touched_share(afd, num_experts)
    reasons = _reasons(touched, logits)
    peer_ms = _peer_medians(afd)
    peer_tokens_per_s = [case.batch / len(peer_ms) / ms * 1e3 for ms in peer_ms]
    return {
        "case": case.name,
        "batch": case.batch,
        "context": case.context,
        "colocated_ms": _round(colocated_ms),
        "afd_ms": _round(afd_ms),
        "ratio": _round(afd_ms / colocated_ms),
        "valid": not reasons,
        "invalid_because": reasons,
        "colocated_spread": spread(colocated),
        "afd_spread": spread(afd),
        "colocated_device_ms": _device_ms(colocated),
        "afd_device_ms": _device_ms(afd),
        "colocated_stream_ms": _stream_ms(colocated),
        "afd_stream_ms": _stream_ms(afd),
        "stream_ratio": _round(_stream_ms(afd) / _stream_ms(colocated)),
        "colocated_tokens_per_s": _round(case.batch / colocated_ms * 1e3),
        "afd_tokens_per_s": _round(sum(peer_tokens_per_s)),
        "tokens_per_s_ratio": _round(sum(peer_tokens_per_s) / case.batch * colocated_ms / 1e3),
        "afd_peer_ms": peer_ms,
        "afd_peer_tokens_per_s": [_round(tokens) for tokens in peer_tokens_per_s],
        "experts_touched": {side: _shown(share) for side, share in touched.items()},
        "mlp": _mean_counts(afd),
        "logits": logits,
    }


def _reasons(touched: dict[str, Touched | None], logits: dict[str, Any] | None) -> list[str]:
    reasons = []
    for side, share in touched.items():
        if share is None:
            reasons.append(f"{side}: the experts touched were not counted")
        elif share.mean < LEAST_TOUCHED:
            reasons.append(
                f"{side}: layers used {share.mean:.1%} of their experts in a step on average, "
                f"{LEAST_TOUCHED:.0%} or more are needed"
            )
    if logits is None:
        reasons.append("the logits of both sides were not compared")
    elif not logits["is_equal_within_bound"]:
        reasons.append(
            f"the logits differ by {logits['median_relative']}, the bound is {logits['bound']}"
        )
    return reasons


def _shown(share: Touched | None) -> dict[str, float] | None:
    return None if share is None else {"min": _round(share.least), "mean": _round(share.mean)}


def _peer_medians(blocks: Sequence[BlockRun]) -> list[float]:
    peers = zip(*(block.peers for block in blocks), strict=True)
    return [_round(statistics.median(ms for run in peer for ms in run.step_ms)) for peer in peers]


def _device_ms(blocks: Sequence[BlockRun]) -> float | None:
    times = [ms for block in blocks for peer in block.peers for ms in peer.device_ms]
    return _round(statistics.median(times)) if times else None


def _stream_ms(blocks: Sequence[BlockRun]) -> float:
    return _round(statistics.median(peer.stream_ms for block in blocks for peer in block.peers))


def _mean_counts(blocks: Sequence[BlockRun]) -> dict[str, float]:
    names = sorted({name for block in blocks for name in block.mlp})
    return {
        name: _round(statistics.mean(block.mlp.get(name, 0.0) for block in blocks))
        for name in names
    }


def _round(value: float) -> float:
    return round(value, 4)
