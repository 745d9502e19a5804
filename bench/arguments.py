"""Words of the benchmarks' command lines."""

import argparse


def count(word: str) -> int:
    """A number of steps or turns.

    Raises:
        argparse.ArgumentTypeError: it is not a whole number from 1 on.
    """
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} is not a whole number from 1 on")
    return int(word)
