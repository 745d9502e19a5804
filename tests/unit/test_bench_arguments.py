"""Benchmarks refuse numbers of steps that measure nothing."""

import argparse

import pytest

from bench.arguments import count


def test_a_count_is_a_whole_number_from_1_on() -> None:
    assert count("12") == 12
    for word in ("0", "-3", "1.5", "many", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from 1 on"):
            count(word)
