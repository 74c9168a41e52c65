"""Gpu: memory, bandwidths and peak rates of one accelerator, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Peak values; what is reached of them is in Constants."""

    name: str
    memory_bytes: float  # free before a model is loaded
    hbm_bytes_per_us: float  # 8 TB/s = 8e6
    link_bytes_per_us: float  # to the other GPUs, one direction: 900 GB/s = 9e5
    network_bytes_per_us: float  # to GPUs outside the link domain: 400 Gb/s = 5e4
    bf16_flops_per_us: float  # dense, without sparsity
    fp8_flops_per_us: float  # as bf16 where the GPU has no FP8
    fp4_flops_per_us: float  # as fp8 where the GPU has no FP4
    gpus_per_node: int
    link_domain_gpus: int  # GPUs that reach each other at link_bytes_per_us
    source: str
    # What a CPU needs beside, measured by `profile`; these values mean a GPU.
    operator_scale: float = 1.0  # fixed costs, over those of kernels in a CUDA graph
    cache_read_share: float = 1.0  # reach of core attention into hbm_bytes_per_us
    core_request_us: float = 0.0  # of core attention for each request, where a loop runs over them

    def __post_init__(self) -> None:
        checks.printable("GPU", self.name)
        owner = f"GPU {self.name}"
        checks.between(owner, "memory_bytes", self.memory_bytes, 1e9, 4e12, "80 GB is 8e10.")
        checks.between(owner, "operator_scale", self.operator_scale, 0.01, 1e4, "1 is a GPU.")
        checks.between(owner, "cache_read_share", self.cache_read_share, 1e-4, 1e2, "1 is a GPU.")
        checks.not_negative(owner, "core_request_us", self.core_request_us)
        hint = "Wanted: microseconds, 1 ms is 1000."
        checks.between(owner, "core_request_us", self.core_request_us + 1, 1, 1e6, hint)
        hint = "1 TB/s is 1e6 bytes per us."
        slowest = 5e3 if self.operator_scale == 1 else 50
        checks.between(owner, "hbm_bytes_per_us", self.hbm_bytes_per_us, slowest, 2e8, hint)
        checks.between(owner, "link_bytes_per_us", self.link_bytes_per_us, 1e2, 2e7, hint)
        checks.between(owner, "network_bytes_per_us", self.network_bytes_per_us, 1e2, 2e7, hint)
        for name in ("bf16_flops_per_us", "fp8_flops_per_us", "fp4_flops_per_us"):
            value = getattr(self, name)
            checks.between(owner, name, value, 2 * slowest, 1e12, "1 PFLOP/s is 1e9 flops per us.")
        checks.whole(owner, "gpus_per_node", self.gpus_per_node)
        checks.whole(owner, "link_domain_gpus", self.link_domain_gpus)
        checks.between(
            owner, "gpus_per_node", self.gpus_per_node, 1, 1e4, "Wanted: GPUs of a host."
        )

    def flops_per_us(self, weight_bytes: float) -> float:
        """Peak of the matrix units for weights of this width."""
        if weight_bytes <= 0.5:
            return self.fp4_flops_per_us
        return self.fp8_flops_per_us if weight_bytes <= 1 else self.bf16_flops_per_us

    def bytes_per_us_among(self, num_gpus: float) -> float:
        """Of one GPU to the others, when this many take part."""
        inside = num_gpus <= self.link_domain_gpus
        return self.link_bytes_per_us if inside else self.network_bytes_per_us


GIB = 2.0**30


@dataclass(frozen=True)
class _DataSheet:
    """In the units of data sheets: GiB free, TB/s, GB/s one way, TFLOP/s without sparsity."""

    memory_gib: float
    hbm: float
    link: float
    network: float
    flops: tuple[float, float, float]  # BF16, FP8, FP4
    per_node: int
    domain: int
    source: str

    def gpu(self, name: str) -> Gpu:
        bf16, fp8, fp4 = (rate * 1e6 for rate in self.flops)
        return Gpu(
            name=name,
            memory_bytes=self.memory_gib * GIB,
            hbm_bytes_per_us=self.hbm * 1e6,
            link_bytes_per_us=self.link * 1e3,
            network_bytes_per_us=self.network * 1e3,
            bf16_flops_per_us=bf16,
            fp8_flops_per_us=fp8,
            fp4_flops_per_us=fp4,
            gpus_per_node=self.per_node,
            link_domain_gpus=self.domain,
            source=self.source,
        )


# Network: one 400 Gb/s port a GPU, 800 Gb/s on GB200 and GB300.
_DATA_SHEETS = {
    "GB200": _DataSheet(
        183.5, 8, 900, 100, (2500, 5000, 10_000), 4, 72,
        "NVIDIA GB200 NVL72 data sheet; memory: FastAFD's page count at memory ratio 0.82",
    ),
    "GB300": _DataSheet(
        277, 8, 900, 100, (2500, 5000, 15_000), 4, 72, "NVIDIA GB300 NVL72 data sheet"
    ),
    "B200": _DataSheet(178, 8, 900, 50, (2250, 4500, 9000), 8, 8, "NVIDIA HGX B200 data sheet"),
    "B300": _DataSheet(268, 8, 900, 100, (2250, 4500, 14_000), 8, 8, "NVIDIA HGX B300 data sheet"),
    "H200": _DataSheet(
        139, 4.8, 450, 50, (989, 1979, 1979), 8, 8, "NVIDIA H200 SXM data sheet; memory: driver"
    ),
    "H100": _DataSheet(79, 3.35, 450, 50, (989, 1979, 1979), 8, 8, "NVIDIA H100 SXM data sheet"),
    "H800": _DataSheet(79, 3.35, 200, 50, (989, 1979, 1979), 8, 8, "NVIDIA H800 SXM data sheet"),
    "H20": _DataSheet(95, 4.0, 450, 50, (148, 296, 296), 8, 8, "NVIDIA H20 data sheet"),
    "MI300X": _DataSheet(
        190, 5.3, 448, 50, (1307, 2615, 2615), 8, 8, "AMD Instinct MI300X data sheet"
    ),
    "MI355X": _DataSheet(
        286, 8, 538, 50, (2500, 5000, 10_000), 8, 8, "AMD Instinct MI355X data sheet"
    ),
}  # fmt: skip

GPUS = {name: sheet.gpu(name) for name, sheet in _DATA_SHEETS.items()}


def known_gpu(name: str) -> Gpu:
    """The GPU whose name is the first word of this one, as in `GB200 NVL72 (a note)`."""
    first = name.split()[0].upper() if name.split() else ""
    if first not in GPUS:
        raise ConfigError(
            f"GPU {name!r} is not in the planner's list ({', '.join(GPUS)}); "
            "describe it with a planner.gpu.Gpu"
        )
    return GPUS[first]
