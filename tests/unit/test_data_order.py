"""The global order: a bijection each epoch, exact shares each block, nothing but functions of a number."""

import pickle
from collections import Counter
from itertools import pairwise

import pytest

from titan.data.samples.order import BLOCK, Mixture, permute, shares
from titan.errors import DataError


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 100, 1000, 1024, 4097])
def test_permute_is_a_bijection(n: int) -> None:
    for key in (0, 1, 2**63, 12345678901234567890):
        assert sorted(permute(i, n, key) for i in range(n)) == list(range(n))


def test_permute_in_a_large_range() -> None:
    n = 10**15 + 37
    images = {permute(i, n, 7) for i in range(5000)}
    assert len(images) == 5000 and max(images) < n and max(images) > n // 2 > min(images)


def test_permute_mixes() -> None:
    """Each place is about equally likely for an element, and neighbors do not stay neighbors."""
    n, keys = 10, 4000
    first = Counter(permute(0, n, key) for key in range(keys))
    expected = keys / n
    chi_square = sum((first[place] - expected) ** 2 / expected for place in range(n))
    assert chi_square < 27.9  # 9 degrees of freedom, p = 0.001
    order = [permute(i, 10_000, 3) for i in range(10_000)]
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 12  # 2 are expected
    assert abs(sum(i * order[i] for i in range(10_000)) / 10_000**3 - 0.25) < 0.005


def test_keys_give_different_orders() -> None:
    orders = {tuple(permute(i, 50, key) for i in range(50)) for key in range(100)}
    assert len(orders) == 100


def test_the_order_is_the_one_of_earlier_versions() -> None:
    """A run that is resumed with a newer titan must go on in its old order."""
    assert [permute(i, 10, 42) for i in range(10)] == [4, 6, 9, 5, 7, 2, 3, 1, 0, 8]
    assert [Mixture([1, 3], 5).locate(g) for g in range(6)] == [(1, 0), (0, 0), (0, 1), (1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize("weights", [[1], [1, 1], [0.7, 0.3], [1, 1, 1], [5, 3, 1, 0.01], [1e-3, 0.4, 0.6]])
def test_shares_are_exact_in_every_block(weights: list[float]) -> None:
    mixture = Mixture(weights, seed=3)
    assert sum(mixture.counts) == BLOCK
    for count, weight in zip(mixture.counts, weights, strict=True):
        assert abs(count - BLOCK * weight / sum(weights)) < 1
    for block in (0, 1, 5):
        drawn = Counter(mixture.locate(g)[0] for g in range(block * BLOCK, (block + 1) * BLOCK))
        assert tuple(drawn[source] for source in range(len(weights))) == mixture.counts


def test_every_draw_of_a_source_comes_once_and_in_order() -> None:
    mixture = Mixture([0.55, 0.25, 0.2], seed=1)
    draws: list[list[int]] = [[], [], []]
    for g in range(3 * BLOCK):
        source, index = mixture.locate(g)
        draws[source].append(index)
    assert all(numbers == list(range(len(numbers))) for numbers in draws)


def test_sources_take_turns_within_a_block() -> None:
    mixture = Mixture([1, 1], seed=1)
    for start in range(0, BLOCK, 64):
        assert 12 < sum(mixture.locate(g)[0] for g in range(start, start + 64)) < 52


def test_a_mixture_is_a_function_of_the_number_alone() -> None:
    mixture = Mixture([2, 1, 4], seed=8)
    forward = [mixture.locate(g) for g in range(9 * BLOCK)]
    other = pickle.loads(pickle.dumps(Mixture([2, 1, 4], seed=8)))
    assert [other.locate(g) for g in reversed(range(9 * BLOCK))] == forward[::-1]
    assert [Mixture([2, 1, 4], seed=9).locate(g) for g in range(100)] != forward[:100]


def test_largest_remainder() -> None:
    assert shares([0.7, 0.3]) == (717, 307)
    assert shares([1, 1, 1]) == (342, 341, 341)
    assert shares([7e300, 3e300]) == shares([0.7, 0.3]), "large weights count as small ones"


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1, 0.0001], r"source 1 has weight 0\.0001 of a total of 1\.0001.* at least 0\.000977"),
        *(
            ([1.0, float(weight)], rf"source 1 has weight {weight}: must be above 0 and finite")
            for weight in ("inf", "nan", "0", "-1")
        ),
        ([1e308, 1e308], r"weight 1e.* of a source is too large"),
        ([1e306, 1.0], r"weight 1e.* of a source is too large"),
    ],
)
def test_weights_that_are_no_shares_are_refused(weights: list[float], said: str) -> None:
    with pytest.raises(DataError, match=said):
        shares(weights)
