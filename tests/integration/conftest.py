"""What the integration tests share: real processes, real servers."""

from __future__ import annotations

import pytest

from tasks.errors import ToolMissing
from tasks.toolchain.triton import TritonInstallation, find_installation


@pytest.fixture(scope="session")
def triton_installation() -> TritonInstallation:
    """The Triton that `make` or `enginehouse serve setup` has made. Never skipped: a green run must mean something."""
    try:
        return find_installation()
    except ToolMissing as error:
        pytest.fail(f"{error}\n`make test` sets one up, as does `enginehouse serve setup`", pytrace=False)
