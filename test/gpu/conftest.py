"""GPU tests are skipped, with the reason, where there is no GPU."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and, without a device, skip everything here."""
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs one CUDA device"))
