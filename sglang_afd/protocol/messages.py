"""Every control message, one tagged union per direction.

A message is one frame; the tensors of an exchange follow as raw frames whose dtypes the handshake
and whose rows the header fix, so that nothing on the wire describes itself.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

MAX_MICRO_BATCHES = 4  # slots of one attention server, at most


class Kind(StrEnum):
    """What sort of step an exchange belongs to."""

    DECODE = "decode"
    PREFILL = "prefill"


class RefusalCode(StrEnum):
    """Why a message or an attach was declined."""

    PROTOCOL = "protocol"  # not understood: garbage, another version, out of order
    SECRET = "secret"  # the shared secrets differ, or only one side has one
    VERSION = "version"  # package or SGLang versions differ
    MODEL = "model"  # fingerprint, shapes or dtype differ
    CAPACITY = "capacity"  # more rows than agreed, or too many peers
    EPOCH = "epoch"  # an exchange of another epoch
    NOT_ATTACHED = "not_attached"  # an exchange before the handshake
    EXPERT = "expert"  # the experts could not run on these rows


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Strict and immutable; unknown fields are refused."""


class ModelSpec(_Message, frozen=True):
    """What both roles must agree on before they exchange rows."""

    package_version: str
    sglang_version: str
    fingerprint: str  # hex SHA-256, see fingerprint.py
    architecture: str  # e.g. Qwen3MoeForCausalLM
    dtype: str  # of hidden states and partial sums on the wire, e.g. "float32"
    hidden_size: int  # H
    top_k: int  # K
    num_experts: int  # logical experts a layer, E
    moe_layer_ids: tuple[int, ...]  # ascending
    max_rows: int  # rows of one exchange at most
    transport: str  # how rows travel: "zmq" through host memory, "cuda_ipc" on the GPUs of one host
    dispatch_dtype: str  # of hidden states on their way out: `dtype`, or "fp8"


class Hello(_Message, frozen=True, tag="hello"):
    """Attention to MLP: opens the handshake."""

    server_id: (
        str  # 1 to 64 letters, digits and ._:- ; names the attention server in logs and metrics
    )
    nonce: bytes  # 32 random bytes
    has_secret: bool


class Attach(_Message, frozen=True, tag="attach"):
    """Asks for a slot table under an epoch; from another MLP rank, to be told the units to run."""

    spec: ModelSpec
    epoch: int  # 0 asks rank 0 to open the next epoch; the other ranks are told it
    proof: bytes  # HMAC, see auth.py
    follower_rank: int  # of the MLP rank that asks; -1 for an attention server


class Detach(_Message, frozen=True, tag="detach"):
    """Attention to MLP: an orderly goodbye."""

    epoch: int


class Dispatch(_Message, frozen=True, tag="dispatch"):
    """Attention to MLP: rows follow in one frame.

    It holds `topk_ids [T, K]` int32 logical expert ids (-1 marks a choice that goes nowhere),
    `topk_weights [T, K]` float32 and `hidden_states [T, H]` in the agreed dtype, in this order.
    """

    epoch: int
    step: int
    layer_id: int
    micro_batch_id: int  # 0 .. num_micro_batches - 1
    num_rows: int  # T, >= 1
    kind: Kind
    num_micro_batches: int  # of this step, 1 .. MAX_MICRO_BATCHES; those with rows


class StepIntent(_Message, frozen=True, tag="step_intent"):
    """Attention to rank 0: a hint about the next step; it may be late, lost or wrong."""

    epoch: int
    step: int
    num_rows: int  # of all micro-batches
    num_micro_batches: int
    kind: Kind


class Withdrawal(_Message, frozen=True, tag="withdrawal"):
    """Attention to rank 0: no step is to come; the scheduler goes idle."""

    epoch: int
    step: int  # the first that is not to come


class Challenge(_Message, frozen=True, tag="challenge"):
    """MLP to attention: proves the secret and asks for the same."""

    nonce: bytes  # 32 random bytes
    proof: bytes  # HMAC, see auth.py


class Attached(_Message, frozen=True, tag="attached"):
    """MLP to attention: the slots are open."""

    epoch: int
    rank: int
    ep_size: int
    first_expert: int
    stop_expert: int  # one past the last
    boot_id: str  # of this MLP process
    door: str  # path of the socket that takes an attention server's slots; "" without any


class Refusal(_Message, frozen=True, tag="refusal"):
    """MLP to attention, or rank 0 to another rank: a message was declined; the connection stays.

    With EPOCH it may come unasked: the session has ended; attach again.
    """

    code: RefusalCode
    message: str


class Combine(_Message, frozen=True, tag="combine"):
    """MLP to attention: one partial sum follows, `[T, H]` in the agreed dtype."""

    epoch: int
    step: int
    layer_id: int
    micro_batch_id: int
    num_rows: int


class Failed(_Message, frozen=True, tag="failed"):
    """MLP to attention: this exchange has no result."""

    epoch: int
    step: int
    layer_id: int
    micro_batch_id: int
    code: RefusalCode
    message: str


class UnitMember(_Message, frozen=True):
    """One exchange of a unit; the epoch of its attachment is the same on every rank."""

    epoch: int
    step: int
    micro_batch_id: int
    num_rows: int


class RunUnit(_Message, frozen=True, tag="run_unit"):
    """Rank 0 to the other ranks: the next decode unit, in the order in which all run them."""

    sequence: int
    layer_id: int
    micro_batch_id: int
    members: tuple[UnitMember, ...]


class OpenSlots(_Message, frozen=True, tag="open_slots"):
    """Attention to MLP, at the door: here are our slots, as two file descriptors beside this.

    The first is the slots' GPU memory, the second the page of their doorbells.
    """

    server_id: str
    epoch: int  # of the attachment, as `Attached` told it
    num_slots: int  # 1 .. MAX_MICRO_BATCHES
    max_ranks: int  # of a group that they are laid out for
    max_rows: int
    hidden_size: int
    top_k: int
    dtype: str
    is_fp8: bool


class SlotsOpened(_Message, frozen=True, tag="slots_opened"):
    """MLP to attention, at the door: the slots are mapped, exchanges may begin."""

    epoch: int


ToMlp = Hello | Attach | Detach | Dispatch | StepIntent | Withdrawal
ToAttn = Challenge | Attached | Refusal | Combine | Failed
ToFollower = Challenge | Attached | Refusal | RunUnit
ToDoor = OpenSlots
FromDoor = SlotsOpened | Refusal
