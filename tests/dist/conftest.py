"""Tests with ranks."""

import pytest

from titan.testing.ranks import start_server


@pytest.fixture(scope="session", autouse=True)
def _warm_server() -> None:
    """Before any test: the first one may read data with processes of its own, whose server lacks what ranks need."""
    start_server()
