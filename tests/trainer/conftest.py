from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.four_facts import make_world


@pytest.fixture(scope="session")
def four_facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a world, see `make_world`."""
    return make_world(tmp_path_factory.mktemp("world"))
