"""What the embedded model is made of: the one set of choices that names a build."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.errors import ConfigError

RECIPE_VERSION = 1  # raised whenever the same fields would give different bytes


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the dense model becomes a mixture of experts.

    Four experts spread over one, two or four MLP ranks (three would leave one without an expert);
    two of them per token is the fewest that makes combine add anything.
    Each further expert costs 159 MB of disk and of MLP memory.
    """

    num_experts: int = 4  # experts per layer, [top_k, 64]
    top_k: int = 2  # experts per token, [1, num_experts]
    seed: int = 0  # of the permutations, scales and router weights; >= 0
    version: int = RECIPE_VERSION

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts <= 64:
            raise ConfigError(
                f"the embedded model cannot have {self.num_experts} experts with top-{self.top_k}; "
                "choose 1 <= top-k <= experts <= 64"
            )
        if self.seed < 0:
            raise ConfigError(f"the seed of the embedded model is {self.seed}; give one >= 0")

    @property
    def name(self) -> str:
        """Directory name in the cache; builds that differ never share one."""
        seed = f"-s{self.seed}" if self.seed else ""
        return f"smollm2-135m-moe-e{self.num_experts}k{self.top_k}{seed}-v{self.version}"
