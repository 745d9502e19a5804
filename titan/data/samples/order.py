"""The global order of samples, as pure functions of a sample's number: nothing to store, nothing to replay.

`permute` shuffles [0, n) in O(1) memory: a Feistel network over the next power of two, walked along its cycle until it
falls below n (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). `Mixture` says which source each
global sample comes from.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from titan.errors import DataError

BLOCK = 1024  # draws within which each source has its exact share

_ROUNDS = 8
_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """A well-mixed 64-bit number of some integers (splitmix64, Steele et al. 2014, chained)."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@lru_cache(maxsize=256)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(mix(key, number) for number in range(_ROUNDS))


def permute(i: int, n: int, key: int) -> int:
    """Where the permutation of [0, n) chosen by `key` sends i. Expected cost: two walks of 8 rounds at most."""
    assert 0 <= i < n
    bits = (n - 1).bit_length()
    low = bits // 2
    low_mask, high_mask = (1 << low) - 1, (1 << (bits - low)) - 1
    keys = _round_keys(key)
    while True:
        high, rest = i >> low, i & low_mask
        for number in range(0, _ROUNDS, 2):
            high ^= mix(keys[number] ^ rest) & high_mask
            rest ^= mix(keys[number + 1] ^ high) & low_mask
        i = high << low | rest
        if i < n:
            return i


def in_epochs(i: int, n: int, *, key: int, shuffle: bool) -> int:
    """Which of n samples the i-th draw of a source is: each epoch of n draws takes each once, in its own order."""
    epoch, position = divmod(i, n)
    return permute(position, n, mix(key, epoch)) if shuffle else position


class Mixture:
    """Sources drawn by weight: in each block of 1,024 draws a source has its share, rounded by largest remainder, and
    the places of the block are given out in a seeded order. Within a source, draws keep their order."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.counts = shares(weights)
        self._seed = seed
        self._layout = lru_cache(maxsize=8)(self._lay_out)

    def __reduce__(self) -> tuple[type["Mixture"], tuple[Sequence[float], int]]:
        return Mixture, (self.counts, self._seed)

    def locate(self, g: int) -> tuple[int, int]:
        """(source, index of the draw within that source) of global sample g."""
        if len(self.counts) == 1:
            return 0, g
        block, place = divmod(g, BLOCK)
        source, nth = self._layout(block)[place]
        return source, block * self.counts[source] + nth

    def _lay_out(self, block: int) -> list[tuple[int, int]]:
        """(source, how many of it came before in the block) for each place of a block."""
        dealt = [source for source, count in enumerate(self.counts) for _ in range(count)]
        key, seen, layout = mix(self._seed, block), [0] * len(self.counts), []
        for place in range(BLOCK):
            source = dealt[permute(place, BLOCK, key)]
            layout.append((source, seen[source]))
            seen[source] += 1
        return layout


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Draws of each source in a block, by largest remainder; they add up to the block. DataError: a weight is not above
    0 and finite, they add up to more than a float holds, or a share is too small to get a single draw."""
    for k, weight in enumerate(weights):
        if not 0 < weight < math.inf:
            raise DataError(f"source {k} has weight {weight:g}: must be above 0 and finite")
    total = sum(weights)
    if math.isinf(BLOCK * total):
        raise DataError(f"weight {max(weights):g} of a source is too large; divide all weights by the same number")
    exact = [BLOCK * weight / total for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda k: (counts[k] - exact[k], k))
    for k in by_remainder[: BLOCK - sum(counts)]:
        counts[k] += 1
    for k, count in enumerate(counts):
        if count == 0:
            given = f"source {k} has weight {weights[k]:g} of a total of {total:g}, less than one sample in {BLOCK}"
            raise DataError(f"{given}; the weight must be at least {total / BLOCK:.3g}")
    return tuple(counts)
