from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_afd.errors import UpstreamMismatch
from sglang_afd.upstream import hooks, versions
from sglang_afd.upstream.hooks import Hook, HookRegistry

SOURCE = """
def greet(name):
    return f"hello {name}"

class Base:
    def run(self, batch):
        return ["ran", batch]
"""
_numbers = iter(range(1000))


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of its own for every test, and a registry without hooks."""
    name = f"afd_hook_target_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    HookRegistry.reset()
    yield importlib.import_module(name)
    HookRegistry.reset()


def around(original: Any, *args: Any) -> Any:
    return ("around", original(*args))


def test_a_function_is_wrapped(target: ModuleType) -> None:
    hooks.install([Hook(target=f"{target.__name__}.greet", type=hooks.AROUND, function=around)])

    assert target.greet("you") == ("around", "hello you")


def test_a_method_is_wrapped_with_its_owner_first(target: ModuleType) -> None:
    hooks.install([Hook(target=f"{target.__name__}.Base.run", type=hooks.AROUND, function=around)])

    assert target.Base().run(3) == ("around", ["ran", 3])


def test_a_function_is_replaced(target: ModuleType) -> None:
    hook = Hook(
        target=f"{target.__name__}.greet", type=hooks.REPLACE, function=lambda name: name[::-1]
    )

    hooks.install([hook])

    assert target.greet("abc") == "cba"


@pytest.mark.parametrize("path", ["nonsense", "Base.nonsense", "nonsense.run"])
def test_a_target_that_does_not_exist_is_refused_before_anything_is_hooked(
    target: ModuleType, path: str
) -> None:
    sound = Hook(target=f"{target.__name__}.greet", type=hooks.AROUND, function=around)
    missing = Hook(target=f"{target.__name__}.{path}", type=hooks.AROUND, function=around)

    with pytest.raises(UpstreamMismatch, match=f"SGLang has no {target.__name__}.{path}"):
        hooks.install([sound, missing])

    assert target.greet("you") == "hello you"


def test_a_module_that_does_not_exist_is_refused() -> None:
    hook = Hook(target="sglang.srt.nowhere.thing", type=hooks.AROUND, function=around)

    with pytest.raises(UpstreamMismatch, match=r"SGLang has no sglang\.srt\.nowhere\.thing"):
        hooks.install([hook])


def test_a_target_that_was_already_patched_is_refused(target: ModuleType) -> None:
    hook = Hook(target=f"{target.__name__}.greet", type=hooks.AROUND, function=around)
    hooks.install([hook])  # SGLang patches a target once, and ignores later hooks silently

    with pytest.raises(UpstreamMismatch, match=rf"{target.__name__}\.greet did not take"):
        hooks.install([hook])


def test_a_target_that_another_plugin_hooks_too_is_refused(target: ModuleType) -> None:
    name = f"{target.__name__}.greet"
    HookRegistry.register(name, around, hooks.AROUND)

    with pytest.raises(UpstreamMismatch, match="another SGLang plugin.*SGLANG_PLUGINS="):
        hooks.install([Hook(target=name, type=hooks.AROUND, function=around)])


def test_a_hook_whose_application_fails_is_refused(target: ModuleType) -> None:
    """SGLang refuses to wrap a class, logs it, and goes on."""
    hook = Hook(target=f"{target.__name__}.Base", type=hooks.AROUND, function=around)

    with pytest.raises(UpstreamMismatch, match=r"\.Base did not take"):
        hooks.install([hook])


def test_a_hook_that_was_undone_later_is_noticed(target: ModuleType) -> None:
    name, original = f"{target.__name__}.greet", target.greet
    hooks.install([Hook(target=name, type=hooks.AROUND, function=around)])
    hooks.verify_installed({name: original})

    target.greet = original

    with pytest.raises(UpstreamMismatch, match="did not take"):
        hooks.verify_installed({name: original})


def test_the_installed_sglang_is_the_one_that_we_hook_into() -> None:
    assert versions.check_version() == versions.SGLANG_VERSION == "0.5.17"


@pytest.fixture(autouse=True)
def forget_the_version() -> Iterator[None]:
    """Looked up once in a process."""
    versions.check_version.cache_clear()
    yield
    versions.check_version.cache_clear()


def test_another_sglang_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: "0.6.0")

    with pytest.raises(UpstreamMismatch) as caught:
        versions.check_version()

    assert "SGLang 0.6.0 is installed; this sglang-afd hooks into 0.5.17" in str(caught.value)
    assert "pip install sglang==0.5.17" in str(caught.value)


def test_a_missing_sglang_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", version)

    with pytest.raises(UpstreamMismatch, match="not installed; pip install sglang==0.5.17"):
        versions.check_version()


def test_the_pin_of_the_package_is_the_version_that_is_checked() -> None:
    pyproject = Path(__file__).parents[3] / "pyproject.toml"

    assert f'"sglang=={versions.SGLANG_VERSION}"' in pyproject.read_text()
