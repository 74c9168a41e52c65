"""The file that marks a build as complete: it is written last and lists all the others."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from sglang_afd.demo.recipe import Recipe

MANIFEST_NAME = "embedded_model.json"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of the build."""

    size_bytes: int
    sha256: str  # lower-case hex


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a directory was built from and what lies in it."""

    recipe: Recipe
    source: str  # package and version that the weights came from
    files: dict[str, FileEntry]  # by name; the manifest itself is not listed


def entry_of(content: bytes) -> FileEntry:
    return FileEntry(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a build, or None where there is none that this version can read."""
    try:
        return msgspec.json.decode((directory / MANIFEST_NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def is_complete(directory: Path, recipe: Recipe) -> bool:
    """Whether the directory holds a build of this recipe; looks at sizes only, so it is instant."""
    manifest = read_manifest(directory)
    if manifest is None or manifest.recipe != recipe:
        return False
    return all(_size(directory / name) == e.size_bytes for name, e in manifest.files.items())


def find_damage(directory: Path) -> list[str]:
    """Names of the files that differ from the manifest, read in full (about a second per GB)."""
    manifest = read_manifest(directory)
    if manifest is None:
        return [MANIFEST_NAME]
    return [name for name, e in manifest.files.items() if _sha256(directory / name) != e.sha256]


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
