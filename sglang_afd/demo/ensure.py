"""Find the embedded model, or build it: once per recipe, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from sglang_afd.demo.manifest import MANIFEST_NAME, is_complete
from sglang_afd.demo.progress import ConsoleProgress, Progress
from sglang_afd.demo.recipe import Recipe
from sglang_afd.demo.store import (
    build_lock,
    require_free_space,
    staged_directory,
    storage_errors,
)
from sglang_afd.errors import ConfigError


def default_cache_dir() -> Path:
    """Directory of this package in the user's cache.

    Source: XDG base directory specification, which says to ignore a relative path.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (root if root.is_absolute() else Path.home() / ".cache") / "sglang-afd"


def ensure_embedded_model(
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    recipe: Recipe | None = None,
) -> Path:
    """Directory of the embedded model, built first if the cache has no complete one.

    Safe to call from several processes at once: one builds, the others wait and reuse.

    Args:
        cache_dir: Where builds are kept, under models/; the user's cache by default.
        progress: Told how far a build is; standard error by default.
        recipe: What to build; the defaults of Recipe by default.
    Raises: ConfigError when the source package is missing or the place cannot hold the model.
    """
    recipe = recipe or Recipe()
    target = (cache_dir or default_cache_dir()) / "models" / recipe.name
    return build_at(target, recipe, progress or ConsoleProgress(), replace=True)


def build_at(
    target: Path, recipe: Recipe, progress: Progress, *, replace: bool, rebuild: bool = False
) -> Path:
    """Make the target a complete build of the recipe; returns at once where it is one already.

    Args:
        target: Directory; created with its parents.
        recipe: What to build.
        progress: Told how far a build is.
        replace: Whether whatever else lies at the target may be removed. An empty directory may
            always be.
        rebuild: Whether to build even where there is a complete build.
    Returns: The target, absolute.
    Raises: ConfigError as ensure_embedded_model, and when the target may not be replaced.
    """
    target = target.absolute()
    if not rebuild and is_complete(target, recipe):
        return target
    if not replace:
        _refuse_if_occupied(target)
    with storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with build_lock(target, lambda: progress(0, 1, "waiting for another builder")):
            if rebuild or not is_complete(target, recipe):
                _build(target, recipe, progress)
    return target


def _build(target: Path, recipe: Recipe, progress: Progress) -> None:
    # NOTE: imported here, since they bring torch and most callers find the model in the cache.
    from sglang_afd.demo.build import CheckpointWriter, checkpoint_bytes
    from sglang_afd.demo.source import DenseSource, find_source

    path = find_source()
    progress(0, 1, "reading the dense model")
    source = DenseSource(path)
    progress(1, 1, "reading the dense model")
    require_free_space(target, checkpoint_bytes(source.config, recipe))
    with staged_directory(target) as staging:
        CheckpointWriter(staging, source, recipe).write_all(progress)


def _refuse_if_occupied(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise ConfigError(
            f"{target} exists and is not a complete build of this model; "
            "choose another directory, or give --force to replace an earlier build"
        )


def refuse_foreign_files(target: Path) -> None:
    """Let --force replace earlier builds only; an empty --output means the current directory.

    Raises: ConfigError when the target holds files and is no build, complete or damaged.
    """
    if target.is_dir() and any(target.iterdir()) and not (target / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"{target.absolute()} holds other files than a build of this model; --force replaces "
            "earlier builds only. Choose another directory, or remove it yourself"
        )
