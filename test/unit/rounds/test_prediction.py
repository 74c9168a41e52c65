from __future__ import annotations

from msgspec.structs import replace

from sglang_afd.rounds.prediction import Predictor
from sglang_afd.rounds.units import Member

LAYERS = (3, 4, 7)


def rows(layer_id: int, micro_batch_id: int = 0, *, step: int = 1, of: int = 1) -> Member:
    return Member(
        peer="a",
        micro_batch_id=micro_batch_id,
        step=step,
        layer_id=layer_id,
        num_rows=5,
        num_micro_batches=of,
    )


def test_the_next_layer_follows_from_a_reply() -> None:
    predictor = Predictor(LAYERS)
    predictor.arrived(rows(3))

    assert predictor.enqueued([rows(3)]) == [rows(4)]


def test_nothing_follows_from_the_last_layer() -> None:
    predictor = Predictor(LAYERS)
    predictor.arrived(rows(7))

    assert predictor.enqueued([rows(7)]) == []


def test_a_doorbell_of_what_was_predicted_says_nothing_new() -> None:
    predictor = Predictor(LAYERS)
    predictor.arrived(rows(3))
    predictor.enqueued([rows(3)])
    predictor.enqueued([rows(4)])

    assert [predictor.arrived(rows(layer)) for layer in LAYERS] == [[], [], []]


def test_the_first_layer_of_the_next_step_is_news() -> None:
    predictor = Predictor(LAYERS)
    predictor.arrived(rows(7))
    predictor.enqueued([rows(7)])

    assert predictor.arrived(rows(3, step=2)) == [rows(3, step=2)]


def test_an_exchange_of_a_step_that_has_passed_is_no_news() -> None:
    predictor = Predictor(LAYERS)
    predictor.arrived(rows(3, step=2))

    assert predictor.arrived(rows(3, step=1)) == []


def test_a_later_micro_batch_waits_for_the_replies_of_the_earlier_one() -> None:
    predictor = Predictor(LAYERS)
    for part in (0, 1):
        predictor.arrived(rows(3, part, of=2))

    assert predictor.enqueued([rows(3, 1, of=2)]) == []
    assert predictor.enqueued([rows(3, 0, of=2)]) == [rows(4, 0, of=2), rows(4, 1, of=2)]


def test_the_first_micro_batch_goes_one_layer_ahead_of_a_later_one() -> None:
    predictor = Predictor(LAYERS)
    for part in (0, 1):
        predictor.arrived(rows(3, part, of=2))

    assert predictor.enqueued([rows(3, 0, of=2)]) == [rows(4, 0, of=2)]
    assert predictor.enqueued([rows(4, 0, of=2)]) == []  # before that it waits for the other one
    assert predictor.enqueued([rows(3, 1, of=2)]) == [rows(7, 0, of=2), rows(4, 1, of=2)]


def test_a_peer_that_attached_in_the_middle_of_its_step_is_known_from_what_it_sends() -> None:
    predictor = Predictor(LAYERS)
    predictor.arrived(rows(4, 0, of=2))  # so the other one has had its reply of layer 3, or waits
    predictor.enqueued([rows(4, 0, of=2)])

    assert predictor.arrived(rows(4, 1, of=2)) == [rows(4, 1, of=2), rows(7, 0, of=2)]


def test_prefill_is_never_predicted() -> None:
    predictor = Predictor(LAYERS)
    prefill = replace(rows(3), is_prefill=True)
    predictor.arrived(prefill)

    assert predictor.enqueued([prefill]) == []
    assert predictor.arrived(prefill) == [prefill]  # the next piece of one that is too large


def test_without_predictions_only_doorbells_count() -> None:
    predictor = Predictor(LAYERS, predicts=False)
    predictor.arrived(rows(3))

    assert predictor.enqueued([rows(3)]) == []
    assert predictor.arrived(rows(4)) == [rows(4)]
    assert predictor.arrived(rows(4)) == []


def test_a_peer_that_left_is_forgotten() -> None:
    predictor = Predictor(LAYERS)
    predictor.arrived(rows(4))
    predictor.forget("a")

    assert predictor.arrived(rows(4)) == [rows(4)]
