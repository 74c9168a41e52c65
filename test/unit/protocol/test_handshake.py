from __future__ import annotations

import string
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peers import SECRET, SPEC, hello, make_gate, make_identity, make_spec, shake

from sglang_afd.errors import ProtocolError, Refused
from sglang_afd.protocol import auth, handshake
from sglang_afd.protocol.handshake import Gate, Greeter
from sglang_afd.protocol.messages import Attach, Attached, Challenge, Refusal, RefusalCode

OTHER_SECRET = b"another secret, as long"


def refuse(gate: Gate, greeter: Greeter, **how: Any) -> Refusal:
    outcome = shake(gate, greeter, **how)
    assert isinstance(outcome, Refusal)
    return outcome


def accept(gate: Gate, greeter: Greeter, **how: Any) -> Attached:
    outcome = shake(gate, greeter, **how)
    assert isinstance(outcome, Attached)
    return outcome


def challenged(gate: Gate, greeter: Greeter, connection: bytes = b"connection") -> Challenge:
    challenge = gate.on_hello(connection, greeter.hello())
    assert isinstance(challenge, Challenge)
    return challenge


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_two_sides_that_agree_attach(secret: bytes) -> None:
    gate = make_gate(secret=secret, rank=1, ep_size=2)

    attached = accept(gate, Greeter("attn-0", SPEC, secret), epoch=42)

    assert attached == Attached(
        epoch=42,
        rank=1,
        ep_size=2,
        first_expert=3,
        stop_expert=6,
        boot_id="0123456789abcdef",
        door="",
    )


def test_the_session_carries_the_server_id_and_the_epoch() -> None:
    gate, greeter = make_gate(), Greeter("attn-7", SPEC, b"")
    attach = greeter.answer(challenged(gate, greeter), epoch=5)

    outcome = gate.on_attach(b"connection", attach, num_peers=0)

    assert not isinstance(outcome, Refusal)
    assert (outcome[0].server_id, outcome[0].epoch) == ("attn-7", 5)


def test_an_mlp_server_with_another_secret_is_found_out_by_its_challenge() -> None:
    gate, greeter = make_gate(secret=OTHER_SECRET), Greeter("attn-0", SPEC, SECRET)

    with pytest.raises(Refused, match=r"MLP server's secret is not this attention") as caught:
        greeter.answer(challenged(gate, greeter), epoch=0)

    assert caught.value.code == RefusalCode.SECRET


def test_an_attention_server_with_another_secret_is_found_out_by_its_attach() -> None:
    gate, greeter = make_gate(secret=SECRET), Greeter("attn-0", SPEC, SECRET)
    challenge = challenged(gate, greeter)
    nonce = greeter.hello().nonce
    forged = Attach(
        spec=SPEC,
        epoch=0,
        proof=auth.prove(OTHER_SECRET, "attn", nonce, challenge.nonce),
        follower_rank=-1,
    )

    refusal = gate.on_attach(b"connection", forged, num_peers=0)

    assert isinstance(refusal, Refusal)
    assert refusal.code == RefusalCode.SECRET
    assert "attention server's secret is not this MLP server's" in refusal.message


@pytest.mark.parametrize(
    ("of_attn", "of_mlp", "has", "lacks"),
    [(SECRET, b"", "attention", "MLP"), (b"", SECRET, "MLP", "attention")],
)
def test_a_secret_on_one_side_only_is_refused_by_name(
    of_attn: bytes, of_mlp: bytes, has: str, lacks: str
) -> None:
    gate, greeter = make_gate(secret=of_mlp), Greeter("attn-0", SPEC, of_attn)

    with pytest.raises(Refused) as caught:
        greeter.answer(gate.on_hello(b"connection", greeter.hello()), epoch=0)

    assert caught.value.code == RefusalCode.SECRET
    assert f"the {has} server requires a shared secret and the {lacks}" in str(caught.value)
    assert "--afd-secret-file" in str(caught.value)


def test_an_mlp_server_without_a_secret_cannot_pose_as_one_that_has_it() -> None:
    greeter = Greeter("attn-0", SPEC, SECRET)
    posing = Challenge(
        nonce=b"m" * 32, proof=auth.prove(b"", "mlp", greeter.hello().nonce, b"m" * 32)
    )

    with pytest.raises(Refused, match="secret"):
        greeter.answer(posing, epoch=0)


def test_a_proof_sent_back_to_its_author_is_refused() -> None:
    greeter = Greeter("attn-0", SPEC, SECRET)
    mirrored = auth.prove(SECRET, "attn", greeter.hello().nonce, b"m" * 32)

    with pytest.raises(Refused, match="secret"):
        greeter.answer(Challenge(nonce=b"m" * 32, proof=mirrored), epoch=0)


OTHER_VALUES: dict[str, tuple[Any, RefusalCode]] = {
    "package_version": ("0.2.0", RefusalCode.VERSION),
    "sglang_version": ("0.5.18", RefusalCode.VERSION),
    "architecture": ("Qwen2MoeForCausalLM", RefusalCode.MODEL),
    "dtype": ("bfloat16", RefusalCode.MODEL),
    "hidden_size": (8, RefusalCode.MODEL),
    "top_k": (3, RefusalCode.MODEL),
    "num_experts": (7, RefusalCode.MODEL),
    "moe_layer_ids": ((0, 1, 2), RefusalCode.MODEL),
    "max_rows": (6, RefusalCode.MODEL),
    "transport": ("cuda_ipc", RefusalCode.MODEL),
    "dispatch_dtype": ("fp8", RefusalCode.MODEL),
    "fingerprint": ("cd" * 32, RefusalCode.MODEL),
}


def test_every_field_of_the_spec_is_compared() -> None:
    assert set(OTHER_VALUES) == set(msgspec.structs.asdict(SPEC))


@pytest.mark.parametrize("field", OTHER_VALUES)
def test_another_value_of_a_field_is_refused_with_both_values(field: str) -> None:
    theirs, code = OTHER_VALUES[field]
    greeter = Greeter("attn-0", make_spec(**{field: theirs}), b"")

    refusal = refuse(make_gate(), greeter)

    assert refusal.code == code
    ours = getattr(SPEC, field)
    assert f"the attention server has {theirs}, the MLP server has {ours}; " in refusal.message


def test_a_spec_that_was_changed_on_the_way_is_refused() -> None:
    gate, greeter = make_gate(secret=SECRET), Greeter("attn-0", make_spec(top_k=3), SECRET)
    attach = greeter.answer(challenged(gate, greeter), epoch=0)

    outcome = gate.on_attach(b"connection", msgspec.structs.replace(attach, spec=SPEC), num_peers=0)

    assert isinstance(outcome, Refusal)
    assert outcome.code == RefusalCode.SECRET


def test_an_attach_without_a_hello_is_refused() -> None:
    attach = Attach(spec=SPEC, epoch=0, proof=b"p" * 32, follower_rank=-1)

    outcome = make_gate().on_attach(b"connection", attach, num_peers=0)

    assert outcome == Refusal(code=RefusalCode.PROTOCOL, message="attach without a hello before it")


def test_an_attach_played_back_is_refused_on_its_own_connection_and_on_another() -> None:
    gate, greeter = make_gate(secret=SECRET), Greeter("attn-0", SPEC, SECRET)
    attach = greeter.answer(challenged(gate, greeter), epoch=0)
    assert not isinstance(gate.on_attach(b"connection", attach, num_peers=0), Refusal)

    again = gate.on_attach(b"connection", attach, num_peers=1)
    gate.on_hello(b"other", greeter.hello())
    elsewhere = gate.on_attach(b"other", attach, num_peers=1)

    assert isinstance(again, Refusal)
    assert again.code == RefusalCode.PROTOCOL
    assert isinstance(elsewhere, Refusal)
    assert elsewhere.code == RefusalCode.SECRET


def test_an_attach_after_its_connection_went_is_refused() -> None:
    gate, greeter = make_gate(), Greeter("attn-0", SPEC, b"")
    attach = greeter.answer(challenged(gate, greeter), epoch=0)

    gate.forget(b"connection")

    assert isinstance(gate.on_attach(b"connection", attach, num_peers=0), Refusal)


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": b"short"},
        {"nonce": b"n" * 33},
        {"server_id": ""},
        {"server_id": "x" * 65},
        {"server_id": "a\nb"},
    ],
)
def test_a_hello_out_of_shape_is_refused(changes: dict[str, Any]) -> None:
    refusal = make_gate().on_hello(b"connection", msgspec.structs.replace(hello(), **changes))

    assert isinstance(refusal, Refusal)
    assert refusal.code == RefusalCode.PROTOCOL
    assert "nonce of 32 bytes and a server id of 1 to 64 letters" in refusal.message


def test_the_oldest_half_open_handshake_makes_room() -> None:
    gate = make_gate()
    greeters = [Greeter(f"attn-{index}", SPEC, b"") for index in range(handshake.MAX_PENDING + 1)]
    attaches = [
        greeter.answer(challenged(gate, greeter, str(index).encode()), epoch=1)
        for index, greeter in enumerate(greeters)
    ]

    outcomes = [
        gate.on_attach(str(index).encode(), attach, num_peers=0)
        for index, attach in enumerate(attaches)
    ]

    refused = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Refusal)]
    assert refused == [0]


def test_a_full_mlp_server_refuses_with_its_number_of_peers() -> None:
    gate = make_gate(max_peers=2)

    refusal = refuse(gate, Greeter("attn-2", SPEC, b""), num_peers=2)

    assert refusal.code == RefusalCode.CAPACITY
    assert "already serves 2 attention servers, its limit" in refusal.message


def test_the_last_free_place_is_given_away() -> None:
    assert accept(make_gate(max_peers=2), Greeter("attn-1", SPEC, b""), num_peers=1)


def test_rank_0_opens_a_new_epoch_for_every_attach() -> None:
    gate = make_gate()

    epochs = [accept(gate, Greeter("attn-0", SPEC, b"")).epoch for _ in range(5)]

    assert len(set(epochs)) == 5
    assert all(epoch > 0 for epoch in epochs)


@given(
    boots=st.lists(
        st.text(alphabet=string.hexdigits.lower()[:16], min_size=16, max_size=16),
        min_size=2,
        max_size=4,
        unique_by=lambda boot: boot[:8],
    )
)
def test_no_epoch_is_repeated_across_boots(boots: list[str]) -> None:
    gates = [Gate(make_identity(boot_id=boot), b"", max_peers=8) for boot in boots]

    epochs = [accept(gate, Greeter("attn-0", SPEC, b"")).epoch for gate in gates for _ in range(3)]

    assert len(set(epochs)) == len(epochs)
    assert all(0 < epoch < 2**63 for epoch in epochs)


@pytest.mark.parametrize("reply", [Refusal(code=RefusalCode.VERSION, message="too old")])
def test_a_refusal_reaches_the_attention_side_word_by_word(reply: Refusal) -> None:
    greeter = Greeter("attn-0", SPEC, b"")

    for step in (lambda: greeter.answer(reply, epoch=0), lambda: greeter.accepted(reply)):
        with pytest.raises(Refused, match="^too old$") as caught:
            step()
        assert caught.value.code == RefusalCode.VERSION


def test_a_reply_out_of_order_is_a_protocol_error() -> None:
    greeter = Greeter("attn-0", SPEC, b"")
    challenge = Challenge(nonce=b"m" * 32, proof=b"p" * 32)
    attached = accept(make_gate(), Greeter("attn-0", SPEC, b""))

    with pytest.raises(ProtocolError, match="expected a challenge, got Attached"):
        greeter.answer(attached, epoch=0)
    with pytest.raises(ProtocolError, match="expected attached, got Challenge"):
        greeter.accepted(challenge)
