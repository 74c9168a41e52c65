"""GPU tests are skipped, with the reason, where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_servers import Start, starter


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and, without a device, skip everything here."""
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs one CUDA device"))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start one server as users do, in processes of its own."""
    with starter(tmp_path_factory.mktemp("servers")) as start:
        yield start
