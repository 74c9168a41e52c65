from __future__ import annotations

import pytest

from sgl_router_afd.control.probe import Outcome, ProbeSchedule, ProbeTerms, Proof, outcome_of

TERMS = ProbeTerms(timeout_s=10.0, first_back_off_s=0.5, max_back_off_s=4.0)


def attached(now_s: float = 0.0) -> ProbeSchedule:
    probes = ProbeSchedule(TERMS)
    probes.on_attached("a", ("a1", "m1"), now_s)
    return probes


def probe(probes: ProbeSchedule, outcome: Outcome, now_s: float) -> None:
    attachment = probes.on_started("a", now_s)
    probes.on_outcome("a", outcome, "detail", now_s, attachment)


def test_a_probe_is_due_at_attach_and_not_again_once_it_has_passed() -> None:
    probes = attached()
    assert probes.due(0.0) == ["a"]

    probe(probes, Outcome.PASSED, 0.0)
    probes.on_attached("a", ("a1", "m1"), 1.0)

    assert probes.due(1e6) == []
    assert probes.next_due_s() is None
    assert probes.proof("a") == (Proof.GOOD, "")


def test_only_one_probe_of_a_server_is_under_way() -> None:
    probes = attached()

    probes.on_started("a", 0.0)

    assert probes.due(5.0) == []


def test_another_attachment_has_to_be_proved_anew() -> None:
    probes = attached()
    probe(probes, Outcome.PASSED, 0.0)

    probes.on_attached("a", ("a1", "m2"), 1.0)

    assert probes.proof("a")[0] is Proof.PENDING
    assert probes.due(1.0) == ["a"]


def test_the_outcome_of_an_earlier_attachment_proves_nothing() -> None:
    probes = attached()
    earlier = probes.on_started("a", 0.0)
    probes.on_attached("a", ("a1", "m2"), 1.0)
    probes.on_started("a", 1.0)

    probes.on_outcome("a", Outcome.PASSED, "", 2.0, earlier)

    assert probes.proof("a")[0] is Proof.PENDING


def test_probes_that_fail_come_less_and_less_often_and_never_end() -> None:
    probes = attached()
    waits, now_s = [], 0.0

    for _ in range(6):
        probe(probes, Outcome.FAILED, now_s)
        due_s = probes.next_due_s()
        assert due_s is not None
        waits.append(due_s - now_s)
        now_s = due_s

    assert waits == [0.5, 1, 2, 4, 4, 4]


def test_a_probe_that_passes_begins_the_back_off_anew() -> None:
    probes = attached()
    for now_s in (0.0, 1.0, 3.0):
        probe(probes, Outcome.FAILED, now_s)
    probe(probes, Outcome.PASSED, 6.0)
    probes.on_trouble("a", "a reset", 7.0, is_certain=False)

    probe(probes, Outcome.FAILED, 7.0)

    assert probes.next_due_s() == 7.5


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.STALLED, "its pair probe got no token in time (detail)"),
        (Outcome.FAILED, "its pair probe failed (detail)"),
        (Outcome.UNREACHABLE, "its pair probe found no connection (detail)"),
    ],
)
def test_what_did_not_pass_is_told_with_its_detail(outcome: Outcome, reason: str) -> None:
    probes = attached()

    probe(probes, outcome, 0.0)

    assert probes.proof("a") == (Proof.BAD, reason)


def test_a_probe_that_is_declined_does_not_count_against_the_server() -> None:
    probes = attached()

    probe(probes, Outcome.DECLINED, 0.0)

    assert probes.proof("a")[0] is Proof.GOOD
    assert "declined" in probes.proof("a")[1]
    assert probes.due(1e6) == []


def test_certain_trouble_takes_the_proof_away_and_doubtful_trouble_only_probes() -> None:
    doubtful, certain = attached(), attached()
    for probes in (doubtful, certain):
        probe(probes, Outcome.PASSED, 0.0)

    doubtful.on_trouble("a", "a peer was silent", 1.0, is_certain=False)
    certain.on_trouble("a", "refuses connections", 1.0, is_certain=True)

    assert (doubtful.proof("a")[0], certain.proof("a")[0]) == (Proof.GOOD, Proof.BAD)
    assert doubtful.due(1.0) == certain.due(1.0) == ["a"]


def test_a_probe_that_began_before_trouble_does_not_prove_that_it_is_over() -> None:
    probes = attached()
    attachment = probes.on_started("a", 0.0)
    probes.on_trouble("a", "refuses connections", 1.0, is_certain=True)

    probes.on_outcome("a", Outcome.PASSED, "", 2.0, attachment)

    assert probes.proof("a") == (Proof.BAD, "refuses connections")
    assert probes.due(2.0) == ["a"]


def test_trouble_does_not_hurry_a_probe_that_backs_off() -> None:
    probes = attached()
    for now_s in (0.0, 1.0, 3.0):
        probe(probes, Outcome.FAILED, now_s)

    probes.on_trouble("a", "a reset", 3.1, is_certain=False)

    assert probes.due(3.2) == []


def test_a_probe_whose_end_is_never_told_counts_as_stalled() -> None:
    probes = attached()
    probes.on_started("a", 0.0)

    lost_s = probes.next_due_s()

    assert lost_s == 2 * TERMS.timeout_s
    assert probes.due(lost_s) == []
    assert probes.proof("a")[0] is Proof.BAD
    assert probes.due(lost_s + 0.5) == ["a"]


def test_a_server_that_detached_has_no_proof_and_no_probe() -> None:
    probes = attached()
    probe(probes, Outcome.PASSED, 0.0)

    probes.on_detached("a")

    assert probes.proof("a")[0] is Proof.PENDING
    assert probes.due(1.0) == []


@pytest.mark.parametrize(
    ("http_status", "num_tokens", "outcome"),
    [
        (200, 1, Outcome.PASSED),
        (200, 0, Outcome.FAILED),
        (400, 0, Outcome.DECLINED),
        (401, 0, Outcome.DECLINED),
        (429, 0, Outcome.DECLINED),
        (500, 0, Outcome.FAILED),
        (502, 0, Outcome.FAILED),
        (503, 0, Outcome.STALLED),
        (302, 0, Outcome.FAILED),
    ],
)
def test_an_answer_means_an_outcome(http_status: int, num_tokens: int, outcome: Outcome) -> None:
    assert outcome_of(http_status, num_tokens) is outcome


def test_a_probe_that_fails_counts_though_requests_had_trouble_meanwhile() -> None:
    probes = attached()
    probe(probes, Outcome.PASSED, 0.0)
    probes.on_trouble("a", "broke off", 1.0, is_certain=False)
    attachment = probes.on_started("a", 1.0)
    probes.on_trouble("a", "broke off", 1.1, is_certain=False)

    probes.on_outcome("a", Outcome.FAILED, "500", 1.2, attachment)

    assert probes.proof("a") == (Proof.BAD, "its pair probe failed (500)")
    assert probes.next_due_s() == 1.2 + TERMS.first_back_off_s
