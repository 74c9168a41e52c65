from __future__ import annotations

import json
from pathlib import Path

from sgl_router_afd.dataplane.messages import NO_TABLE, NOBODY, ModelRow, ServerRow, Table
from sgl_router_afd.gateway.manifest import Manifest, Worker, manifest_of, write


def row(slot: int, state: str = "serving") -> ServerRow:
    return ServerRow(
        slot=slot, server_id=f"attn-{slot}", url=f"http://a:{slot}", state=state, reason=""
    )


def table(rows: list[ServerRow], **models: tuple[int, ...]) -> Table:
    by_name = {name: ModelRow(slots=slots) for name, slots in models.items()}
    return Table(rows=tuple(rows), models=by_name, unnamed=NOBODY, unknown=NOBODY)


def test_only_servers_that_requests_may_go_to_are_listed_each_with_its_model() -> None:
    rows = [row(0), row(1, "degraded"), row(2), row(3, "draining"), row(4, "unplaced")]

    manifest = manifest_of(table(rows, m=(0,), n=(2,)))

    assert manifest.workers == (
        Worker(id="attn-0", url="http://a:0", model_id="m"),
        Worker(id="attn-2", url="http://a:2", model_id="n"),
    )


def test_a_server_with_two_names_is_listed_once_under_the_first() -> None:
    manifest = manifest_of(table([row(0)], m=(0,), alias=(0,)))

    assert [worker.model_id for worker in manifest.workers] == ["m"]


def test_nobody_is_listed_before_anybody_has_come() -> None:
    assert manifest_of(NO_TABLE) == Manifest()


def test_the_file_is_replaced_whole_by_what_smg_reads(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    write(Manifest(), path)
    before = path.open("rb")

    write(manifest_of(table([row(7)], m=(7,))), path)

    with before:
        assert before.read() == b'{"version":1,"workers":[]}'
    assert json.loads(path.read_bytes()) == {
        "version": 1,
        "workers": [{"id": "attn-7", "url": "http://a:7", "model_id": "m"}],
    }
    assert list(tmp_path.iterdir()) == [path]
