"""Which rank owns which expert (pure integers)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_afd.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShard:
    """The contiguous logical experts of one expert-parallel rank.

    Every rank has `num_local` expert places; the last ranks' places beyond `num_experts` are
    phantom experts, which no token is ever routed to.
    """

    rank: int  # 0 .. ep_size - 1
    ep_size: int  # number of MLP ranks, >= 1
    num_experts: int  # logical experts of the model, >= 1

    def __post_init__(self) -> None:
        if self.ep_size < 1 or not 0 <= self.rank < self.ep_size:
            raise ConfigError(
                f"--afd-ep-rank {self.rank} does not fit --ep-size {self.ep_size}; "
                f"ranks go from 0 to ep-size - 1"
            )
        if self.first >= self.num_experts:
            raise ConfigError(
                f"rank {self.rank} of --ep-size {self.ep_size} would own none of the model's "
                f"{self.num_experts} experts ({self.num_local} a rank); use fewer MLP ranks"
            )

    @property
    def num_local(self) -> int:
        """Expert places of each rank, phantom ones included."""
        return -(-self.num_experts // self.ep_size)

    @property
    def num_padded(self) -> int:
        """Expert places of all ranks together; a multiple of `ep_size`."""
        return self.num_local * self.ep_size

    @property
    def first(self) -> int:
        """The first logical expert of this rank."""
        return self.rank * self.num_local

    @property
    def stop(self) -> int:
        """One past the last logical expert of this rank; phantom places are not counted."""
        return min(self.first + self.num_local, self.num_experts)


def check_coverage(ranges: Iterable[tuple[int, int]], num_experts: int) -> None:
    """Check that half-open expert ranges cover every expert exactly once.

    Args:
        ranges: (first, stop) of each MLP rank, in any order.
        num_experts: Logical experts of the model.

    Raises:
        ConfigError: Names the first expert that nobody, or more than one rank, owns.
    """
    covered = 0
    for first, stop in sorted(ranges):
        if first > covered:
            raise ConfigError(
                f"no MLP rank owns experts {covered} to {first - 1}; start the missing rank"
            )
        if first < covered:
            raise ConfigError(
                f"expert {first} is owned by two MLP ranks; give each rank its own --afd-ep-rank"
            )
        covered = stop
    if covered != num_experts:
        raise ConfigError(
            f"the MLP ranks cover {covered} of {num_experts} experts; start the missing ranks"
        )
