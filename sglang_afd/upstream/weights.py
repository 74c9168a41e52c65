"""Which tensors each role reads from a checkpoint, and how many it did read."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import safetensors
from torch import Tensor

# The two names under which SGLang's loader finds its safetensors iterators.
ITERATOR_HOOKS = (
    "sglang.srt.model_loader.weight_utils.buffered_multi_thread_safetensors_weights_iterator",
    "sglang.srt.model_loader.weight_utils.safetensors_weights_iterator",
)

_EXPERT = re.compile(r"\.experts\.")  # not `shared_expert.` and not `shared_experts.`


def is_expert_tensor(name: str) -> bool:
    """Does a checkpoint's tensor belong to a routed expert?"""
    return _EXPERT.search(name) is not None


@dataclass(kw_only=True)
class ReadCount:
    """What was read; `/afd/v1/status` and `/server_info` show it."""

    num_tensors: int = 0
    num_expert_tensors: int = 0
    num_skipped: int = 0
    num_bytes: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Count one tensor that was read."""
        self.num_tensors += 1
        self.num_expert_tensors += is_expert_tensor(name)
        self.num_bytes += tensor.numel() * tensor.element_size()


def read_tensors(
    files: Sequence[str], wanted: Callable[[str], bool], count: ReadCount
) -> Generator[tuple[str, Tensor], None, None]:
    """Yield (name, CPU tensor) of the wanted tensors; the others' bytes are never touched."""
    for file in files:
        with safetensors.safe_open(file, framework="pt", device="cpu") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                if not wanted(name):
                    count.num_skipped += 1
                    continue
                tensor = shard.get_tensor(name)
                count.add(name, tensor)
                yield name, tensor


def without_experts(
    count: ReadCount,
) -> Callable[..., Generator[tuple[str, Tensor], None, None]]:
    """A replacement for SGLang's iterators that skips expert tensors.

    SGLang's tuning arguments (threads, mmap, prefetch) are accepted and have no effect: what is
    left without the experts is small.
    """

    def iterate(
        hf_weights_files: Sequence[str], *args: object, **kwargs: object
    ) -> Generator[tuple[str, Tensor], None, None]:
        return read_tensors(hf_weights_files, lambda name: not is_expert_tensor(name), count)

    return iterate
