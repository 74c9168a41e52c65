from __future__ import annotations

import pytest

from sgl_router_afd.dataplane.listen import open_listeners
from sglang_afd.errors import ConfigError


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_a_name_that_no_resolver_takes_is_a_mistake_of_the_flag(host: str) -> None:
    with pytest.raises(ConfigError, match="no host has that name.*choose an address.*--host"):
        open_listeners(host, 0, 1)
