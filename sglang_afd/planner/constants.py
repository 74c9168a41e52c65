"""Constants: what is reached of the hardware, and the fixed costs; each has bounds and a source.

A constant is fitted to measured steps from its prior: the fit may move it within the bounds, and
needs evidence to move it far. What the measured rows do not show stays at the prior.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from sglang_afd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Prior:
    """A value known before any step is measured."""

    value: float
    spread: float  # standard deviation of its logarithm: 0.1 is about 10 %
    low: float
    high: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Times are per layer and micro-batch unless the name says step."""

    kv_read_efficiency: float
    weight_read_efficiency: float
    core_fixed_us: float
    core_request_tokens: float
    dense_flops_efficiency: float
    routing_skew: float
    colocated_dense_fixed_us: float
    colocated_expert_fixed_us: float
    colocated_expert_flops_efficiency: float
    colocated_exchange_fixed_us: float
    colocated_exchange_efficiency: float
    colocated_rank_step_us: float
    colocated_step_fixed_us: float
    afd_dense_fixed_us: float
    afd_expert_fixed_us: float
    afd_expert_flops_efficiency: float
    afd_tile_rows: float
    afd_exchange_fixed_us: float
    afd_step_fixed_us: float

    def __post_init__(self) -> None:
        for name, prior in PRIORS.items():
            value = getattr(self, name)
            if not prior.low * (1 - 1e-9) <= value <= prior.high * (1 + 1e-9):
                raise ConfigError(
                    f"constant {name} is {value:g}, outside its physical bounds "
                    f"{prior.low:g} to {prior.high:g} ({prior.source})"
                )

    def scaled(self, **factors: float) -> Constants:
        """Some of them times a factor, kept within their bounds; for what-if and error bands."""
        changed = {}
        for name, factor in factors.items():
            prior = PRIORS[name]
            changed[name] = min(max(getattr(self, name) * factor, prior.low), prior.high)
        return replace(self, **changed)


_KERNELS = "FastAFD fork, kernel table (GB200)"

PRIORS: dict[str, Prior] = {
    "kv_read_efficiency": Prior(
        value=0.90,
        spread=0.04,
        low=0.5,
        high=1.0,
        source=f"{_KERNELS}: 3 x 128K tokens of 2048 bytes in 112.2 us = 7.18 of 8 TB/s",
    ),
    "weight_read_efficiency": Prior(
        value=0.90,
        spread=0.05,
        low=0.5,
        high=1.0,
        source=f"{_KERNELS}: 1.648 + 0.987 us per expert of 18.9 MB = 7.16 of 8 TB/s",
    ),
    "core_fixed_us": Prior(
        value=4.0,
        spread=0.5,
        low=1.0,
        high=40.0,
        source=f"start and drain; {_KERNELS}: small kernels take 1.6 to 4.6 us; H200: 12 to 26 us",
    ),
    # A block of threads starts on a request with nothing to read yet: as if it held more tokens.
    "core_request_tokens": Prior(
        value=30.0,
        spread=1.0,
        low=1.0,
        high=300.0,
        source="aiconfigurator-core 0.12, decode attention: H100 and H200 50 to 140, GB200 0 to 20",
    ),
    "dense_flops_efficiency": Prior(
        value=0.25,
        spread=0.5,
        low=0.03,
        high=0.8,
        source="matrix units at tens of rows; a wide guess, it matters above 100 rows only",
    ),
    "routing_skew": Prior(
        value=0.5,
        spread=0.3,
        low=0.05,
        high=1.2,
        source="Zipf exponent of expert popularity; a measured histogram replaces it",
    ),
    "colocated_dense_fixed_us": Prior(
        value=42.0,
        spread=0.2,
        low=15.0,
        high=90.0,
        source=f"12 small kernels of 3.5 us a layer; {_KERNELS}: 1.6 to 4.6 us each",
    ),
    "colocated_expert_fixed_us": Prior(
        value=12.0,
        spread=0.4,
        low=2.0,
        high=50.0,
        source="3 to 4 kernels: two grouped GEMMs, activation, quantization",
    ),
    "colocated_expert_flops_efficiency": Prior(
        value=0.25,
        spread=0.4,
        low=0.03,
        high=0.8,
        source="FastAFD's own count: 28 % of peak for the experts at 395 requests a GPU",
    ),
    "colocated_exchange_fixed_us": Prior(
        value=30.0,
        spread=0.3,
        low=8.0,
        high=80.0,
        source=f"{_KERNELS}: DeepEP dispatch 14.8 + combine 19.5 us at 3 tokens a GPU",
    ),
    "colocated_exchange_efficiency": Prior(
        value=0.13,
        spread=0.3,
        low=0.05,
        high=0.9,
        source="DeepEP README: low-latency kernels reach 98 to 127 GB/s (0.11 to 0.14 of NVLink 5)",
    ),
    "colocated_rank_step_us": Prior(
        value=100.0,
        spread=0.6,
        low=1.0,
        high=2000.0,
        source="ranks start a step one after another; a guess of 0.1 ms a rank, fitted",
    ),
    "colocated_step_fixed_us": Prior(
        value=500.0,
        spread=0.6,
        low=50.0,
        high=3000.0,
        source="embedding, sampling, logits: about 100 small kernels",
    ),
    "afd_dense_fixed_us": Prior(
        value=35.0,
        spread=0.15,
        low=15.0,
        high=90.0,
        source=f"10 kernels of 3.5 us: FastAFD fuses quantization and RoPE; {_KERNELS}",
    ),
    "afd_expert_fixed_us": Prior(
        value=12.0,
        spread=0.4,
        low=2.0,
        high=60.0,
        source="one persistent kernel and its barriers over NVLink",
    ),
    "afd_expert_flops_efficiency": Prior(
        value=0.20,
        spread=0.2,
        low=0.03,
        high=0.8,
        source=f"{_KERNELS}: 0.987 us a block + 0.01249 us a row = 0.17 of peak at 32 rows a block",
    ),
    "afd_tile_rows": Prior(
        value=32.0,
        spread=0.2,
        low=16.0,
        high=128.0,
        source="DeepGEMM block sizes for a few rows per expert: 16, 32, 64",
    ),
    "afd_exchange_fixed_us": Prior(
        value=4.0,
        spread=0.5,
        low=0.5,
        high=40.0,
        source="one flag over NVLink each way, 2 us, and its poll",
    ),
    "afd_step_fixed_us": Prior(
        value=1500.0,
        spread=0.4,
        low=50.0,
        high=5000.0,
        source="embedding, sampling and the coordinator, whose clock the AFD rows use",
    ),
}

NAMES = tuple(field.name for field in fields(Constants))

DEFAULTS = Constants(**{name: PRIORS[name].value for name in NAMES})
