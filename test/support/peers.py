"""Two sides of one tiny exchange: their spec, their gate, their rows."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_afd.protocol.auth import NONCE_BYTES
from sglang_afd.protocol.handshake import Gate, Greeter, MlpIdentity
from sglang_afd.protocol.messages import (
    Attach,
    Attached,
    Challenge,
    Dispatch,
    Hello,
    Kind,
    ModelSpec,
    Refusal,
)
from sglang_afd.topology import ExpertShard

SECRET = b"a secret of some length"
SPEC = ModelSpec(
    package_version="0.1.0",
    sglang_version="0.5.17",
    fingerprint="ab" * 32,
    architecture="Qwen3MoeForCausalLM",
    dtype="float32",
    hidden_size=4,
    top_k=2,
    num_experts=6,
    moe_layer_ids=(0, 1, 3),
    max_rows=5,
    transport="zmq",
    dispatch_dtype="float32",
)


def make_spec(**changes: Any) -> ModelSpec:
    """`SPEC` with some fields changed."""
    return msgspec.structs.replace(SPEC, **changes)


def make_identity(
    spec: ModelSpec = SPEC, *, rank: int = 0, ep_size: int = 1, boot_id: str = "0123456789abcdef"
) -> MlpIdentity:
    """One MLP rank with its contiguous share of the experts."""
    shard = ExpertShard(rank=rank, ep_size=ep_size, num_experts=spec.num_experts)
    return MlpIdentity(
        spec=spec,
        rank=rank,
        ep_size=ep_size,
        first_expert=shard.first,
        stop_expert=shard.stop,
        boot_id=boot_id,
    )


def make_gate(
    spec: ModelSpec = SPEC, secret: bytes = b"", *, max_peers: int = 8, **identity: Any
) -> Gate:
    """The gate of one MLP rank."""
    return Gate(make_identity(spec, **identity), secret, max_peers=max_peers)


def hello(server_id: str = "attn-0", *, has_secret: bool = False) -> Hello:
    """A hello as a raw client would write it."""
    return Hello(server_id=server_id, nonce=b"n" * NONCE_BYTES, has_secret=has_secret)


def shake(
    gate: Gate,
    greeter: Greeter,
    connection: bytes = b"connection",
    *,
    epoch: int = 0,
    num_peers: int = 0,
) -> Attached | Refusal:
    """A whole handshake without a transport; a challenge that fails raises in the greeter."""
    challenge = gate.on_hello(connection, greeter.hello())
    attach: Attach = greeter.answer(challenge, epoch=epoch)
    assert isinstance(challenge, Challenge)
    outcome = gate.on_attach(connection, attach, num_peers=num_peers)
    return outcome if isinstance(outcome, Refusal) else outcome[1]


def make_header(**changes: Any) -> Dispatch:
    """The header of one decode exchange of two rows."""
    header = Dispatch(
        epoch=7,
        step=3,
        layer_id=1,
        micro_batch_id=0,
        num_rows=2,
        kind=Kind.DECODE,
        num_micro_batches=4,
    )
    return msgspec.structs.replace(header, **changes)
