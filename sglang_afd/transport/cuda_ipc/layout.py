"""Where everything lies in a slab and on a doorbell page (pure); `exchange.cu` reads the same.

A slab is the memory of one attention server's slots: one control page, one page of words for each
slot, then the rows. Words are 32 bits wide; two of them make a 64-bit number, the low one first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from operator import mul

from sglang_afd.config import FP8, MAX_MLP_RANKS
from sglang_afd.protocol.messages import MAX_MICRO_BATCHES, Dispatch, Kind, ModelSpec

PAGE_BYTES = 4096
DOORBELL_BYTES = PAGE_BYTES
DOORBELL_LINE_BYTES = 128
ALIGNMENT_BYTES = 256
FP8_GROUP = 128  # values that share one scale, as DeepGEMM reads them
EVERY_ROW = 1 << 30  # staged as a step's rows where the tensors themselves have the right size

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
KINDS: Sequence[Kind] = (Kind.DECODE, Kind.PREFILL)

# Words of the control page.
LINK, NUM_RANKS, EPOCH, STEP_WORDS = 0, 1, 2, 16
NUM_STEP_WORDS = 5  # step (2), kind, micro-batches, rows
# Words of a slot; a line of its own for each that is polled.
REQUEST_SEQ, HEADER = 0, 1
NUM_ROWS = HEADER + 6
ROWS_WANTED = 12  # what ROWS_HERE is when every row of the exchange is there
ROWS_HERE, ROWS_BEFORE = 32, 33  # blocks of all dispatches, and those of the ones before
NUM_REPLIED, NUM_WANTED = 64, 65  # rows of replies of all ranks; read at once
ALL_REPLIED, NUM_RINGS = 96, 112
# A word of the doorbell page, behind the lines of all slots: the host's own, to end every wait.
ABORTED_AT = DOORBELL_BYTES // 4 - 1
NUM_HEADER_WORDS = 10  # sequence, epoch (2), step (2), layer, micro-batch, rows, kind, number

_POWERS = tuple(31**power for power in reversed(range(1 + NUM_HEADER_WORDS)))


class LinkWord(IntEnum):
    """What every send and wait on the attention side reads first."""

    DETACHED = 0  # nothing is exchanged: warm-up and capture
    ATTACHED = 1
    ABORTED = 2  # sticky: every wait ends, nothing is sent


class WaitPolicy(StrEnum):
    """How a stream waits for a flag."""

    POLL = "poll"  # a kernel of one warp; for a GPU of its own, or under MPS
    MEMOP = "memop"  # stream memory operations; for a shared GPU without MPS


def sum_of_ring(words: Sequence[int]) -> int:
    """What follows the counter and the header on a doorbell's line, if both are of one ring."""
    if len(words) != len(_POWERS):
        raise AssertionError(f"a ring has {len(_POWERS)} words, got {len(words)}")
    total: int = sum(map(mul, words, _POWERS))
    return total & 0xFFFFFFFF


def header_of(words: Sequence[int]) -> tuple[int, Dispatch]:
    """What a doorbell says of the exchange in its slot, and the sequence number of that."""
    seq, epoch, epoch_high, step, step_high, layer_id, micro_batch_id, num_rows, kind, number = (
        words[:NUM_HEADER_WORDS]
    )
    header = Dispatch(
        epoch=epoch | epoch_high << 32,
        step=step | step_high << 32,
        layer_id=layer_id,
        micro_batch_id=micro_batch_id,
        num_rows=num_rows,
        kind=KINDS[kind],
        num_micro_batches=number,
    )
    return seq, header


@dataclass(frozen=True, kw_only=True)
class SlabShape:
    """Sizes that both sides must agree on.

    Raises:
        ValueError: A size that the layout has no room for.
    """

    num_slots: int  # micro-batches of a step at most, 1 .. 4
    max_ranks: int  # MLP ranks that may reply, 1 .. MAX_MLP_RANKS
    max_rows: int  # rows of one exchange
    hidden_size: int  # H, a multiple of 128
    top_k: int  # K
    dtype: str  # of partial sums, and of hidden states unless is_fp8: a key of ITEMSIZES
    is_fp8: bool = False  # hidden states go as e4m3 with one float32 scale for 128 values

    def __post_init__(self) -> None:
        if not 1 <= self.num_slots <= MAX_MICRO_BATCHES:
            raise ValueError(f"{self.num_slots} slots; 1 to {MAX_MICRO_BATCHES} fit into a slab")
        if not 1 <= self.max_ranks <= MAX_MLP_RANKS:
            raise ValueError(f"{self.max_ranks} MLP ranks; 1 to {MAX_MLP_RANKS} fit into a slab")
        if self.dtype not in ITEMSIZES:
            raise ValueError(f"dtype {self.dtype} is none of {', '.join(ITEMSIZES)}")
        group = FP8_GROUP if self.is_fp8 else 16 // ITEMSIZES[self.dtype]
        if self.hidden_size % group:
            raise ValueError(f"hidden size {self.hidden_size} is not a multiple of {group}")

    @property
    def row_bytes(self) -> int:
        """One row of a partial sum."""
        return self.hidden_size * ITEMSIZES[self.dtype]

    @property
    def request_row_bytes(self) -> int:
        """One row of hidden states as it is sent, without its scales."""
        return self.hidden_size if self.is_fp8 else self.row_bytes

    @property
    def areas(self) -> Mapping[str, int]:
        """Offset of each area of a slot from the slot's own start; `end` is its size."""
        sizes = {
            "words": PAGE_BYTES,
            "hidden_states": self.max_rows * self.request_row_bytes,
            "scales": self.max_rows * self.hidden_size // FP8_GROUP * 4 if self.is_fp8 else 0,
            "topk_ids": self.max_rows * self.top_k * 4,
            "topk_weights": self.max_rows * self.top_k * 4,
            "replies": self.max_ranks * self.reply_bytes,
        }
        offsets, offset = {}, 0
        for name, size in sizes.items():
            offsets[name] = offset
            offset += _aligned(size)
        return offsets | {"end": offset}

    @property
    def reply_bytes(self) -> int:
        """From one rank's partial sums to the next one's."""
        return _aligned(self.max_rows * self.row_bytes)

    @property
    def num_bytes(self) -> int:
        """Of the whole slab."""
        return PAGE_BYTES + self.num_slots * self.areas["end"]

    def slot_offset(self, slot: int, area: str = "words") -> int:
        """Where an area of a slot begins in the slab."""
        return PAGE_BYTES + slot * self.areas["end"] + self.areas[area]


def shape_of(spec: ModelSpec, *, num_slots: int, max_ranks: int) -> SlabShape:
    """The shape of slots for what both roles agreed on."""
    return SlabShape(
        num_slots=num_slots,
        max_ranks=max_ranks,
        max_rows=spec.max_rows,
        hidden_size=spec.hidden_size,
        top_k=spec.top_k,
        dtype=spec.dtype,
        is_fp8=spec.dispatch_dtype == FP8,
    )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
