"""The attention side's memory: slots that its kernels fill and MLP ranks read and answer into."""

from __future__ import annotations

import mmap
import os
import threading

import torch
from torch import Tensor

from sglang_afd.errors import CapacityError, ConfigError
from sglang_afd.protocol.messages import Kind
from sglang_afd.transport.cuda_ipc import driver, kernels, layout
from sglang_afd.transport.cuda_ipc.kernels import POINTER, U32, U64, VECTOR_BYTES
from sglang_afd.transport.cuda_ipc.layout import LinkWord, SlabShape, WaitPolicy
from sglang_afd.transport.cuda_ipc.streams import own_stream

_SUM_BLOCKS = 64
_WORD = torch.int32


class Slab:
    """Slots of one attention server, and the doorbell that its kernels ring.

    What is captured in CUDA graphs names addresses in this memory only. It outlives every link.

    Args:
        shape: Sizes; `shape.num_bytes` of device memory are taken.
        device: CUDA's index of the GPU.
        policy: How streams wait for replies.

    Raises:
        ConfigError: This GPU has no FP8.
    """

    def __init__(self, shape: SlabShape, device: int, policy: WaitPolicy) -> None:
        if shape.is_fp8 and not kernels.has_fp8(device):
            raise ConfigError("this GPU cannot quantise to FP8; leave out --afd-dispatch-dtype fp8")
        self.shape = shape
        self.link = LinkWord.DETACHED
        self.device = device
        self._policy = policy
        self._module = kernels.module(device, shape.dtype)
        self._memory = driver.SharedMemory(shape.num_bytes, device)
        self._page = driver.SharedPage(layout.DOORBELL_BYTES, device)
        self.fds = (self._memory.export(), self._page.descriptor)
        self._page_words = memoryview(mmap.mmap(self.fds[1], layout.DOORBELL_BYTES)).cast("I")
        self._control_lock = threading.Lock()
        self._control_stream = own_stream(device, is_urgent=True)  # it ends waits
        self._stream = self._control_stream.cuda_stream
        dtype = getattr(torch, shape.dtype)
        self._replies = [
            self._memory.view(
                shape.slot_offset(slot, "replies"), (shape.max_rows, shape.hidden_size), dtype
            )
            for slot in range(shape.num_slots)
        ]
        with driver.on_device(device):
            driver.set_words(self._stream, self._memory.address, 0, shape.num_bytes // 4)
        self._set_link(LinkWord.DETACHED)

    # Control, from any thread; done on the device when it returns.

    def attach(self, epoch: int, num_ranks: int) -> None:
        """Open the link to `num_ranks` MLP ranks; what is pending is asked of each of them anew.

        Raises:
            CapacityError: The slab has no room for the replies of so many.
        """
        if num_ranks > self.shape.max_ranks:
            raise CapacityError(
                f"the group has {num_ranks} MLP ranks, this attention server has room for the "
                f"replies of {self.shape.max_ranks}; start it with --afd-max-mlp-ranks {num_ranks}"
            )
        self._set_link(LinkWord.ATTACHED, epoch, num_ranks)

    def abort(self) -> None:
        """End every wait and send nothing more, until `detach`.

        Under WaitPolicy.MEMOP it waits in turn for a thread that frees GPU memory behind a wait.
        NOTE: call it again until the step has ended; a dispatch that was on its way when the link
        word changed may have occupied its slot after this.
        """
        self._page_words[layout.ABORTED_AT] = 1  # first: a launch may have to wait for the wait
        self._set_link(LinkWord.ABORTED)

    def detach(self) -> None:
        """Forget what is pending, while no step runs."""
        self._set_link(LinkWord.DETACHED)
        self._page_words[layout.ABORTED_AT] = 0

    def num_replied(self, slot: int) -> int:
        """How many ranks have replied to what is in a slot, if none is in the midst of it."""
        words = self._memory.view(self.shape.slot_offset(slot), (layout.NUM_REPLIED + 1,), _WORD)
        with torch.cuda.stream(self._control_stream):
            here = words.cpu()
        return int(here[layout.NUM_REPLIED]) // max(1, int(here[layout.NUM_ROWS]))

    def close(self) -> None:
        """Free everything, once no step runs and no graph will; idempotent."""
        if self._page.address:
            torch.cuda.synchronize(self.device)
            self._replies.clear()
            self._page_words.release()
            os.close(self.fds[0])
            self._page.close()
            self._memory.close()
            self._page.address = 0

    # In the order of torch's current stream.

    def stage_step(self, *, step: int, kind: Kind, num_micro_batches: int, num_rows: int) -> None:
        """What the next dispatches say of their step; not for capture.

        Args:
            step: Its number.
            kind: Of its rows.
            num_micro_batches: Those with rows.
            num_rows: Of all micro-batches; `layout.EVERY_ROW` where no tensor is padded.
        """
        driver.launch(
            self._module.function("afd_stage_step"),
            driver.current_stream(self.device),
            1,
            1,
            kernels.arguments(
                (self._memory.address, POINTER),
                (step & 0xFFFFFFFF, U32),
                (step >> 32, U32),
                (layout.KINDS.index(kind), U32),
                (num_micro_batches, U32),
                (num_rows, U32),
            ),
        )

    def dispatch(
        self,
        slot: int,
        layer_id: int,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        first_row: int = 0,
        rings: bool,
    ) -> None:
        """Put rows into a slot and tell every rank; capturable, and nothing while not attached.

        Args:
            slot: The micro-batch.
            layer_id: Of the layer.
            hidden_states: [T, H] in the slab's dtype, contiguous, T <= max_rows.
            topk_ids: [T, K] int32, contiguous; logical expert ids, -1 goes nowhere.
            topk_weights: [T, K] float32, contiguous.
            first_row: Of the micro-batch in its step; rows beyond the step's are padding.
            rings: Whether the MLP ranks' hosts are to hear of it.
        """
        shape = self.shape
        num_rows = hidden_states.shape[0]
        if num_rows > shape.max_rows:
            raise CapacityError(
                f"{num_rows} rows in one exchange; {shape.max_rows} fit, see --afd-max-rows"
            )
        _check(hidden_states, getattr(torch, shape.dtype), shape.hidden_size)
        _check(topk_ids, torch.int32, shape.top_k)
        _check(topk_weights, torch.float32, shape.top_k)
        base, vectors = self._memory.address, shape.row_bytes // VECTOR_BYTES

        def area(name: str) -> int:
            return base + shape.slot_offset(slot, name)

        driver.launch(
            self._module.function("afd_dispatch"),
            driver.current_stream(self.device),
            num_rows,
            kernels.block_of(vectors),
            kernels.arguments(
                (base, POINTER),
                (area("words"), POINTER),
                (self._page.address + slot * layout.DOORBELL_LINE_BYTES, POINTER),
                (hidden_states.data_ptr(), POINTER),
                (topk_ids.data_ptr(), POINTER),
                (topk_weights.data_ptr(), POINTER),
                (area("hidden_states"), POINTER),
                (area("scales") if shape.is_fp8 else 0, POINTER),
                (area("topk_ids"), POINTER),
                (area("topk_weights"), POINTER),
                (vectors, U32),
                (shape.top_k, U32),
                (layer_id, U32),
                (slot, U32),
                (first_row, U32),
                (int(rings), U32),
            ),
        )

    def combine(self, slot: int, num_rows: int) -> Tensor:
        """Wait for every rank and add their partial sums in rank order; capturable.

        Returns: [num_rows, H], a view of the slot, valid until its next dispatch. Whatever was
            there before while not attached.
        """
        stream = driver.current_stream(self.device)
        base, words = self._memory.address, self._memory.address + self.shape.slot_offset(slot)
        if self._policy is WaitPolicy.MEMOP:
            driver.wait_value(stream, words + layout.ALL_REPLIED * 4, 1)
        else:
            aborted = self._page.address + layout.ABORTED_AT * 4
            waits = kernels.arguments((base, POINTER), (words, POINTER), (aborted, POINTER))
            driver.launch(self._module.function("afd_wait"), stream, 1, kernels.WARP, waits)
        if self.shape.max_ranks > 1:
            num_vectors = num_rows * self.shape.row_bytes // VECTOR_BYTES
            driver.launch(
                self._module.function("afd_sum"),
                stream,
                min(_SUM_BLOCKS, -(-num_vectors // kernels.MAX_BLOCK)),
                kernels.MAX_BLOCK,
                kernels.arguments(
                    (base, POINTER),
                    (base + self.shape.slot_offset(slot, "replies"), POINTER),
                    (self.shape.reply_bytes // VECTOR_BYTES, U64),
                    (num_vectors, U32),
                ),
            )
        return self._replies[slot][:num_rows]

    def _set_link(self, link: LinkWord, epoch: int = 0, num_ranks: int = 0) -> None:
        shape, base = self.shape, self._memory.address
        with self._control_lock, driver.on_device(self.device):
            driver.launch(
                self._module.function("afd_set_link"),
                self._stream,
                1,
                shape.num_slots,
                kernels.arguments(
                    (base, POINTER),
                    (base + layout.PAGE_BYTES, POINTER),
                    (shape.areas["end"], U64),
                    (self._page.address, POINTER),
                    (int(link), U32),
                    (epoch & 0xFFFFFFFF, U32),
                    (epoch >> 32, U32),
                    (num_ranks, U32),
                ),
            )
            self.link = link
            driver.synchronize(self._stream)


def _check(tensor: Tensor, dtype: torch.dtype, width: int) -> None:
    if tensor.dtype != dtype or tensor.shape[1] != width or not tensor.is_contiguous():
        raise AssertionError(
            f"rows came as {tuple(tensor.shape)} {tensor.dtype}, "
            f"{'' if tensor.is_contiguous() else 'not '}contiguous; expected width {width} {dtype}"
        )
