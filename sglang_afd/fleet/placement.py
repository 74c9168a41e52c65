"""Which server runs on which GPU of this host (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_afd.fleet.gpus import Gpu


@dataclass(frozen=True, kw_only=True)
class Placement:
    """GPUs, and the index among them of each server's."""

    gpus: Sequence[Gpu]
    index_of: Mapping[str, int]  # by the server's name

    def others_on(self, name: str) -> list[str]:
        """Servers that share this one's GPU."""
        index = self.index_of[name]
        return [other for other, its in self.index_of.items() if its == index and other != name]

    @property
    def is_shared(self) -> bool:
        """Do any two servers share a GPU?"""
        return len(set(self.index_of.values())) < len(self.index_of)

    def describe(self) -> list[str]:
        """One line for each server."""
        lines = []
        for name, index in self.index_of.items():
            others = self.others_on(name)
            shared = f", shared with {', '.join(others)}" if others else ""
            lines.append(f"{name} on GPU {index} ({self.gpus[index].model}){shared}")
        return lines


def place(*, attn: int, mlp: int, spares: int, gpus: Sequence[Gpu]) -> Placement:
    """Give each MLP rank a GPU of its own as far as there are some, then the others in turn.

    With fewer GPUs than servers the attention servers share those that no MLP rank has, since an
    MLP rank is at work for all of them; they share with MLP ranks where none is left. A spare waits
    beside the rank of its number, whose memory it needs when that rank has ended.

    Args:
        attn: Attention servers.
        mlp: MLP ranks.
        spares: MLP servers that wait for a rank.
        gpus: At least one.
    """
    number = len(gpus)
    index_of = {f"mlp-{rank}": rank % number for rank in range(mlp)}
    has_own = number >= mlp + attn + spares
    for index in range(spares):
        place_of_spare = mlp + attn + index if has_own else index % mlp % number
        index_of[f"mlp-{mlp + index}"] = place_of_spare
    for index in range(attn):
        if number > mlp:
            index_of[f"attn-{index}"] = mlp + index % (number - mlp)
        else:
            index_of[f"attn-{index}"] = (mlp + index) % number
    return Placement(gpus=gpus, index_of=index_of)
