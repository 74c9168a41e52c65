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

    def __post_init__(self) -> None:
        owner = f"GPU {self.name}"
        checks.between(owner, "memory_bytes", self.memory_bytes, 1e9, 4e12, "80 GB is 8e10.")
        hint = "1 TB/s is 1e6 bytes per us."
        checks.between(owner, "hbm_bytes_per_us", self.hbm_bytes_per_us, 5e3, 2e8, hint)
        checks.between(owner, "link_bytes_per_us", self.link_bytes_per_us, 1e2, 2e7, hint)
        checks.between(owner, "network_bytes_per_us", self.network_bytes_per_us, 1e2, 2e7, hint)
        for name in ("bf16_flops_per_us", "fp8_flops_per_us", "fp4_flops_per_us"):
            value = getattr(self, name)
            checks.between(owner, name, value, 1e4, 1e12, "1 PFLOP/s is 1e9 flops per us.")
        checks.whole(owner, "gpus_per_node", self.gpus_per_node)
        checks.whole(owner, "link_domain_gpus", self.link_domain_gpus)

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

GPUS = {
    "GB200": Gpu(
        name="GB200",
        memory_bytes=183.5 * GIB,
        hbm_bytes_per_us=8e6,
        link_bytes_per_us=9e5,
        network_bytes_per_us=1e5,
        bf16_flops_per_us=2.5e9,
        fp8_flops_per_us=5e9,
        fp4_flops_per_us=1e10,
        gpus_per_node=4,
        link_domain_gpus=72,
        source="NVIDIA GB200 NVL72 data sheet; memory: FastAFD's page count at memory ratio 0.82",
    ),
    "H200": Gpu(
        name="H200",
        memory_bytes=139 * GIB,
        hbm_bytes_per_us=4.8e6,
        link_bytes_per_us=4.5e5,
        network_bytes_per_us=5e4,
        bf16_flops_per_us=0.989e9,
        fp8_flops_per_us=1.979e9,
        fp4_flops_per_us=1.979e9,
        gpus_per_node=8,
        link_domain_gpus=8,
        source="NVIDIA H200 SXM data sheet; memory: as reported free by the driver",
    ),
    "H100": Gpu(
        name="H100",
        memory_bytes=79 * GIB,
        hbm_bytes_per_us=3.35e6,
        link_bytes_per_us=4.5e5,
        network_bytes_per_us=5e4,
        bf16_flops_per_us=0.989e9,
        fp8_flops_per_us=1.979e9,
        fp4_flops_per_us=1.979e9,
        gpus_per_node=8,
        link_domain_gpus=8,
        source="NVIDIA H100 SXM data sheet",
    ),
    "B200": Gpu(
        name="B200",
        memory_bytes=178 * GIB,
        hbm_bytes_per_us=8e6,
        link_bytes_per_us=9e5,
        network_bytes_per_us=5e4,
        bf16_flops_per_us=2.25e9,
        fp8_flops_per_us=4.5e9,
        fp4_flops_per_us=9e9,
        gpus_per_node=8,
        link_domain_gpus=8,
        source="NVIDIA HGX B200 data sheet",
    ),
}


def known_gpu(name: str) -> Gpu:
    """The GPU whose name is the first word of this one, as in `GB200 NVL72 (a note)`."""
    first = name.split()[0].upper() if name.split() else ""
    if first not in GPUS:
        raise ConfigError(
            f"GPU {name!r} is not in the planner's list ({', '.join(GPUS)}); "
            "describe it with a planner.gpu.Gpu"
        )
    return GPUS[first]
