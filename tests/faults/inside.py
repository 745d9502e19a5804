"""A pytest plugin for copies of the checkout: refuses to run tests if titan or its plugins come from elsewhere."""

from pathlib import Path

import pytest

import titan
import titan.plugins


def pytest_configure(config: pytest.Config) -> None:
    """Compare where the packages were imported from with where the tests are."""
    for package in (titan, titan.plugins):
        (place,) = package.__path__
        if not Path(place).absolute().is_relative_to(config.rootpath):
            raise pytest.UsageError(f"{package.__name__} was imported from {place}, required: below {config.rootpath}")
