from __future__ import annotations

import pytest

from sgl_router_afd.control.ratio import Choice, Ratio, Size, parse_ratio
from sglang_afd.errors import ConfigError


def test_a_ratio_is_read() -> None:
    assert parse_ratio("7:1") == Ratio(num_attn=7, num_mlp=1)
    assert parse_ratio("") is None


@pytest.mark.parametrize(
    "text", ["7", ":", "7:", "7:0", "0:1", "7:1:1", "-7:1", "7.5:1", "9999:1", f"{'9' * 5000}:1"]
)
def test_what_is_no_ratio_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--ratio got"):
        parse_ratio(text)


@pytest.mark.parametrize(("num_mlp", "target"), [(1, 4), (2, 7), (3, 11)])
def test_a_target_is_rounded_up(num_mlp: int, target: int) -> None:
    assert Ratio(num_attn=7, num_mlp=2).target(num_mlp) == target


def test_a_group_whose_experts_all_have_a_server_goes_before_one_that_lacks_some() -> None:
    full = Size(name="b", num_attn=9, num_mlp=1, is_whole=True)
    bare = Size(name="a", num_attn=0, num_mlp=1, is_whole=False)

    assert Choice([bare, full], None).best() == "b"
    assert Choice([bare], None).best() == "a"


def test_without_any_group_none_is_chosen() -> None:
    assert Choice([], Ratio(num_attn=1, num_mlp=1)).best() == ""


def test_each_group_that_is_chosen_counts_one_more() -> None:
    sizes = [Size(name=f"group-{i}", num_attn=0, num_mlp=1, is_whole=True) for i in (10, 9, 2)]
    choice = Choice(sizes, Ratio(num_attn=2, num_mlp=1))
    chosen = []

    for _ in range(9):
        chosen.append(choice.best())
        choice.count(choice.best())

    filled = ["group-2"] * 2 + ["group-9"] * 2 + ["group-10"] * 2
    assert chosen == [*filled, "group-2", "group-9", "group-10"]


def test_larger_groups_get_more() -> None:
    large = Size(name="large", num_attn=3, num_mlp=4, is_whole=True)
    small = Size(name="small", num_attn=1, num_mlp=1, is_whole=True)

    assert Choice([small, large], None).best() == "large"
