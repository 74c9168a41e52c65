"""docs/rounds.md: its pictures are of what the rounds do now, and its names are in the tree."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from sglang_afd.mlp.board import Board
from sglang_afd.mlp.board_metrics import render
from sglang_afd.rounds.options import RoundOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rounds.md").read_text(encoding="utf-8")
OUT = ROOT / "docs" / "pictures" / "rounds"

sys.path.insert(0, str(ROOT / "benchmark"))

from round_pictures.recording import Recording  # noqa: E402
from round_pictures.scenes import PICTURES, Picture  # noqa: E402


def picture(name: str) -> Picture:
    return PICTURES[name]()


def recordings(name: str) -> list[Recording]:
    return [panel.recording for panel in picture(name).panels]


def units(name: str, panel: int = 0) -> list[str]:
    return picture(name).panels[panel].units.split()


def steps_ended(recording: Recording) -> int:
    return sum(len(ended) for ended in recording.steps_ended.values())


# The page


def test_the_page_shows_every_picture_once_and_no_other() -> None:
    shown = re.findall(r"\(pictures/rounds/([a-z-]+)\.svg\)", PAGE)

    assert sorted(shown) == sorted(PICTURES)
    assert sorted(path.stem for path in OUT.iterdir()) == sorted(PICTURES)


def test_every_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", PAGE))
    tests = "\n".join(path.read_text() for path in ROOT.glob("test/**/test_*.py"))

    assert len(named) > 30
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_every_metric_that_the_page_names_is_there() -> None:
    metrics = render(Board(1), rank=0, first_expert=0).decode()
    named = set(re.findall(r"`(sglang_afd_mlp_[a-z_]+)`", PAGE))

    assert len(named) > 8
    assert [name for name in named if f"\n{name}{{" not in metrics] == []


def test_the_page_has_the_options_and_their_values() -> None:
    options = RoundOptions()

    for name in options.__dataclass_fields__:
        value = getattr(options, name)
        assert f"| `{name}` | {value:g} |" in PAGE


# The pictures


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_of_what_the_rounds_do_now(name: str) -> None:
    text = (OUT / f"{name}.svg").read_text(encoding="utf-8")
    [told] = re.findall(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)

    assert unescape(told) == picture(name).told, f"python benchmark/draw_rounds.py {name}"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_small_and_its_text_is_text(name: str) -> None:
    text = (OUT / f"{name}.svg").read_text(encoding="utf-8")

    assert len(text) < 160_000
    assert "MLP rank 0</text>" in text
    assert "dc:date" not in text


@pytest.mark.parametrize("name", PICTURES)
def test_the_rounds_of_a_picture_wait_only_for_rows_that_will_come(name: str) -> None:
    waits = recordings(name)[0].waits

    assert all(wait.is_sound for wait in waits)


def test_rounds_end_more_than_twice_as_many_steps_as_first_come_first_served() -> None:
    rounds, alone = recordings("first-come")

    assert {run.peers for run in rounds.runs} == {"abcd"}
    assert {len(run.peers) for run in alone.runs} == {1}
    assert (steps_ended(rounds), steps_ended(alone)) == (20, 8)


def test_a_round_goes_without_a_peer_whose_prefill_still_runs() -> None:
    rounds, planted = recordings("commit-at-arrival")
    text = units("commit-at-arrival")

    first, last = text.index("b@0.0[0+300]"), text.index("b@2.0[0+300]")
    assert {unit for unit in text[first:last] if "b" not in unit} == {"a@0.0", "a@1.0", "a@2.0"}
    assert text[last + 1 : last + 4] == ["ab@0.0", "ab@1.0", "ab@2.0"]
    assert any(not wait.is_sound for wait in planted.waits)
    assert len(planted.steps_ended["a"]) < len(rounds.steps_ended["a"])


def test_a_late_peer_is_in_the_next_round() -> None:
    expected = [f"{peers}@{layer}.0" for peers in ("abc", "abcd") for layer in range(4)]

    assert units("one-round") == expected


def test_a_peer_waited_for_in_vain_is_not_waited_for_until_it_came() -> None:
    rounds = [unit for unit in units("window") if unit.endswith("@0.0")]

    assert rounds == ["abc@0.0", "ab@0.0", "ab@0.0", "abc@0.0", "abc@0.0"]


def window_lengths(name: str) -> Iterator[float]:
    panel = picture(name).panels[0]
    for bar in panel.recording.bars:
        if bar.kind == "window" and panel.begin_ms < bar.begin_ms < panel.end_ms:
            yield bar.end_ms - bar.begin_ms


def test_the_window_in_vain_is_longer_than_the_one_after_it() -> None:
    lengths = list(window_lengths("window"))

    assert lengths[1] > 2 * lengths[2]


def test_two_halves_meet_only_where_the_clock_begins_at_the_end_of_a_round() -> None:
    clock, arrival = (set(panel.units.split()) for panel in picture("window-clock").panels)

    assert "abcd@0.0" in clock
    assert {unit.split("@")[0] for unit in arrival} == {"ab", "cd"}


def test_a_parked_peer_boards_at_its_layer_and_goes_on_with_the_others() -> None:
    text = units("parking")

    assert text[:4] == ["abc@0.0", "abc@1.0", "ab@2.0", "ab@3.0"]
    boards = text.index("abc@2.0")
    assert text[boards - 1] == "ab@1.0"
    assert {unit.split("@")[0] for unit in text[boards:]} == {"abc"}


def test_at_most_one_piece_goes_between_two_units_of_a_round() -> None:
    text = units("prefill")
    within = [
        sum(unit.startswith("p@") for unit in text[first + 1 : second])
        for first, second in decode_pairs(text)
    ]

    assert set(within) == {0, 1}
    assert text[-1] == "p@2.0[0+600]"  # nobody decodes any more


def test_a_piece_goes_before_a_unit_that_is_ready_as_soon_as_it_is_old() -> None:
    [panel] = picture("prefill").panels
    rests = {bar.kind for bar in panel.recording.bars if bar.lane == "MLP rank 0"}

    assert "member wait" not in rests  # decode units are ready all the time
    assert "p@1.0[250+246]" in panel.units


def decode_pairs(text: list[str]) -> Iterator[tuple[int, int]]:
    """Neighbouring decode units of one round, as indices."""
    decode = [index for index, unit in enumerate(text) if unit.startswith("ab@")]
    for first, second in zip(decode, decode[1:], strict=False):
        if not text[second].endswith("@0.0"):
            yield first, second


def test_peers_with_fewer_micro_batches_are_in_fewer_units() -> None:
    assert units("micro-batches")[:4] == ["abc@0.0", "ac@0.1", "abc@1.0", "ac@1.1"]


def test_every_rank_runs_one_sequence_and_each_alone_comes_to_a_standstill() -> None:
    together, alone = recordings("ranks")
    sequences = [
        [(run.unit.sequence, str(run)) for run in together.runs_of(rank)] for rank in (0, 1)
    ]

    assert sequences[0] == sequences[1]
    assert [sequence for sequence, _ in sequences[0]] == [1, 2, 3, 4, 5, 6]
    assert (steps_ended(together), steps_ended(alone)) == (4, 0)


def test_what_a_rank_waits_for_comes_and_is_run() -> None:
    [recording] = recordings("invariant")

    ran = {
        (member.peer, member.layer_id, member.micro_batch_id)
        for run in recording.runs
        for member in run.unit.members
    }

    assert recording.waits
    assert {(wait.peer, wait.layer_id, wait.micro_batch_id) for wait in recording.waits} <= ran


def test_others_go_on_when_a_member_dies() -> None:
    text = units("death")

    assert text == [*(f"abc@{layer}.0" for layer in range(2)), "ac@2.0", "ac@3.0"] + [
        f"ac@{layer}.0" for layer in range(4)
    ]
