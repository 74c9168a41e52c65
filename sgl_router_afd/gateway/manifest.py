"""The file that tells smg of its servers: those that serve, each with its model."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from sgl_router_afd.dataplane.messages import Table

VERSION = 1  # of the file's format; smg refuses others


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One server, as smg reads it."""

    id: str
    url: str
    model_id: str  # the only name that smg takes for it


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All of them; smg drops a file with anything else in it, and keeps the one before."""

    version: int = VERSION
    workers: tuple[Worker, ...] = ()


def manifest_of(table: Table) -> Manifest:
    """The servers that requests may go to now: serving attention servers of READY groups."""
    rows = {row.slot: row for row in table.rows}
    workers: dict[int, Worker] = {}
    for model, model_row in table.models.items():
        for slot in model_row.slots:
            row = rows[slot]
            worker = Worker(id=row.server_id, url=row.url, model_id=model)
            workers.setdefault(slot, worker)
    return Manifest(workers=tuple(workers.values()))


def write(manifest: Manifest, path: Path) -> None:
    """Replace the file in one step; a reader sees the whole old one or the whole new one."""
    beside = path.with_suffix(".new")
    beside.write_bytes(msgspec.json.encode(manifest))
    os.replace(beside, path)
