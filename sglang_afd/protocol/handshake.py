"""Who may attach: the MLP side's gate and the attention side's half, as pure state machines."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from sglang_afd.errors import ProtocolError, Refused
from sglang_afd.protocol import auth
from sglang_afd.protocol.messages import (
    Attach,
    Attached,
    Challenge,
    Hello,
    ModelSpec,
    Refusal,
    RefusalCode,
)

_SERVER_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")  # it is written into logs and metrics
MAX_PENDING = 256  # half-open handshakes; the oldest makes room


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpIdentity:
    """What one MLP rank is, as it answers in `Attached`."""

    spec: ModelSpec
    rank: int
    ep_size: int
    first_expert: int
    stop_expert: int
    boot_id: str
    door: str = ""  # path of the socket that takes slots; "" where rows come over ZeroMQ


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One attached attention server, as one MLP rank sees it."""

    server_id: str
    epoch: int
    follower_rank: int = -1  # -1 for an attention server


class Gate:
    """The MLP side: answers hellos and attaches, and remembers nothing of those it refused."""

    def __init__(self, identity: MlpIdentity, secret: bytes, *, max_peers: int) -> None:
        self.identity = identity
        self._secret = secret
        self._max_peers = max_peers
        self._pending: OrderedDict[bytes, tuple[Hello, bytes]] = OrderedDict()
        self._last_epoch = 0

    def open_door(self, path: str) -> None:
        """Whoever attaches from now on is told where to bring its slots."""
        self.identity = dataclasses.replace(self.identity, door=path)

    def on_hello(self, connection: bytes, hello: Hello) -> Challenge | Refusal:
        """First message of `connection`; the answer proves that this side knows the secret."""
        if len(hello.nonce) != auth.NONCE_BYTES or not _SERVER_ID.fullmatch(hello.server_id):
            return Refusal(
                code=RefusalCode.PROTOCOL,
                message=f"hello needs a nonce of {auth.NONCE_BYTES} bytes and a server id of "
                f"1 to 64 letters, digits and ._:- ; got {len(hello.nonce)} bytes and "
                f"{hello.server_id!r:.80}",
            )
        if hello.has_secret != bool(self._secret):
            return Refusal(code=RefusalCode.SECRET, message=_one_sided_secret(hello.has_secret))
        nonce = secrets.token_bytes(auth.NONCE_BYTES)
        self._pending[connection] = (hello, nonce)
        if len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)
        proof = auth.prove(self._secret, "mlp", hello.nonce, nonce)
        return Challenge(nonce=nonce, proof=proof)

    def on_attach(
        self, connection: bytes, attach: Attach, *, num_peers: int
    ) -> tuple[Session, Attached] | Refusal:
        """Second message; on success the caller opens the session."""
        pending = self._pending.pop(connection, None)
        if pending is None:
            return Refusal(code=RefusalCode.PROTOCOL, message="attach without a hello before it")
        hello, nonce = pending
        if not auth.verify(attach.proof, self._secret, "attn", hello.nonce, nonce, _bound(attach)):
            return Refusal(
                code=RefusalCode.SECRET,
                message="the attention server's secret is not this MLP server's; "
                "give both the same --afd-secret-file",
            )
        difference = compare(attach.spec, self.identity.spec)
        if difference is not None:
            return difference
        if attach.follower_rank != -1:
            return self._on_follower(hello.server_id, attach.follower_rank)
        if num_peers >= self._max_peers:
            return Refusal(
                code=RefusalCode.CAPACITY,
                message=f"this MLP server already serves {num_peers} attention servers, its limit",
            )
        epoch = attach.epoch or self._next_epoch()
        return Session(server_id=hello.server_id, epoch=epoch), self._attached(epoch)

    def forget(self, connection: bytes) -> None:
        """Drop a half-open handshake of a connection that is gone."""
        self._pending.pop(connection, None)

    def _on_follower(self, server_id: str, rank: int) -> tuple[Session, Attached] | Refusal:
        identity = self.identity
        if identity.rank != 0 or not 1 <= rank < identity.ep_size:
            return Refusal(
                code=RefusalCode.PROTOCOL,
                message=f"rank {rank} cannot follow rank {identity.rank} of {identity.ep_size}; "
                f"ranks 1 to {identity.ep_size - 1} follow rank 0",
            )
        return Session(server_id=server_id, epoch=0, follower_rank=rank), self._attached(0)

    def _attached(self, epoch: int) -> Attached:
        identity = self.identity
        return Attached(
            epoch=epoch,
            rank=identity.rank,
            ep_size=identity.ep_size,
            first_expert=identity.first_expert,
            stop_expert=identity.stop_expert,
            boot_id=identity.boot_id,
            door=identity.door,
        )

    def _next_epoch(self) -> int:
        # NOTE: the boot id is part of it, so that a restarted leader never repeats an epoch.
        boot = int(self.identity.boot_id[:8], 16)
        self._last_epoch += 1
        return (boot << 24) | (self._last_epoch & 0xFFFFFF)


class Greeter:
    """The side that asks in one handshake with one MLP rank: attention, or a rank that follows."""

    def __init__(
        self, server_id: str, spec: ModelSpec, secret: bytes, *, follower_rank: int = -1
    ) -> None:
        self._follower_rank = follower_rank
        self._server_id = server_id
        self._spec = spec
        self._secret = secret
        self._nonce = secrets.token_bytes(auth.NONCE_BYTES)

    def hello(self) -> Hello:
        """The opening message."""
        return Hello(server_id=self._server_id, nonce=self._nonce, has_secret=bool(self._secret))

    def answer(self, reply: object, *, epoch: int) -> Attach:
        """Check the MLP side's proof and give ours.

        Raises:
            Refused: The MLP side refused, or could not prove the secret.
            ProtocolError: Something else than a challenge came back.
        """
        match reply:
            case Refusal():
                raise Refused(reply.code, reply.message)
            case Challenge():
                pass
            case _:
                raise ProtocolError(f"expected a challenge, got {type(reply).__name__}")
        if not auth.verify(reply.proof, self._secret, "mlp", self._nonce, reply.nonce):
            raise Refused(
                RefusalCode.SECRET,
                "the MLP server's secret is not this attention server's; "
                "give both the same --afd-secret-file",
            )
        attach = Attach(spec=self._spec, epoch=epoch, proof=b"", follower_rank=self._follower_rank)
        proof = auth.prove(self._secret, "attn", self._nonce, reply.nonce, _bound(attach))
        return msgspec.structs.replace(attach, proof=proof)

    def accepted(self, reply: object) -> Attached:
        """The final answer; errors as in `answer`."""
        match reply:
            case Attached():
                return reply
            case Refusal():
                raise Refused(reply.code, reply.message)
            case _:
                raise ProtocolError(f"expected attached, got {type(reply).__name__}")


_COMPARED = {
    "package_version": (RefusalCode.VERSION, "sglang-afd version", "install the same on both"),
    "sglang_version": (RefusalCode.VERSION, "SGLang version", "install the same on both"),
    "architecture": (RefusalCode.MODEL, "model architecture", "start both with the same model"),
    "dtype": (RefusalCode.MODEL, "dtype", "start both with the same --dtype"),
    "hidden_size": (RefusalCode.MODEL, "hidden size", "start both with the same model"),
    "top_k": (RefusalCode.MODEL, "top-k", "start both with the same model and overrides"),
    "num_experts": (RefusalCode.MODEL, "number of experts", "start both with the same model"),
    "moe_layer_ids": (RefusalCode.MODEL, "MoE layers", "start both with the same model"),
    "max_rows": (RefusalCode.MODEL, "rows per exchange", "give both the same --afd-max-rows"),
    "transport": (RefusalCode.MODEL, "transport", "start both with the same --afd-transport"),
    "dispatch_dtype": (
        RefusalCode.MODEL,
        "dtype of dispatched rows",
        "start both with the same --afd-dispatch-dtype",
    ),
    "fingerprint": (
        RefusalCode.MODEL,
        "model fingerprint",
        "start both with the same checkpoint and quantisation",
    ),
}


def compare(attn: ModelSpec, mlp: ModelSpec) -> Refusal | None:
    """The first difference between two specs as a refusal that names both values."""
    for field, (code, name, remedy) in _COMPARED.items():
        theirs, ours = getattr(attn, field), getattr(mlp, field)
        if theirs != ours:
            return Refusal(
                code=code,
                message=f"{name} differs: the attention server has {theirs}, "
                f"the MLP server has {ours}; {remedy}",
            )
    return None


def _bound(attach: Attach) -> bytes:
    bound = (attach.spec, attach.follower_rank)
    return hashlib.sha256(msgspec.msgpack.encode(bound)).digest()


def _one_sided_secret(attn_has_it: bool) -> str:
    has, lacks = ("attention", "MLP") if attn_has_it else ("MLP", "attention")
    return (
        f"the {has} server requires a shared secret and the {lacks} server has none; "
        f"give both the same --afd-secret-file"
    )
