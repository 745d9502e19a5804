"""Random numbers by position: equal at any layout, under recomputation, and after a resume.

Each number is a function of where it is used, and of nothing else:

    number = philox4x32-10(key = (run's seed, module's name), counter = (feature, position, sample, step))

Position and sample are global: the place in the whole sequence, and the number in the order in which a run consumes
its samples. No generator keeps a state, so ranks, micro batches and recomputation may draw in any order. Philox is a
counter-based generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

# B rows, S positions of this rank, W numbers per position, C calls of Philox per position.

from collections.abc import Sequence

import torch
from torch import Tensor, library, nn

from titan.contracts.base.cost import Elementwise, SavedTensor
from titan.errors import PluginError

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four random words from a counter of four words and a key of two.

    All are int64 tensors of words from 0 to 2^32 - 1, of shapes that broadcast. Products of two words wrap in int64,
    which leaves their bits right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        # c1 and c3 keep more than 32 bits: the next round cuts what it makes of them.
        c0, c1 = ((second >> 32) ^ (c1 ^ k0)) & _WORD, second
        c2, c3 = ((first >> 32) ^ (c3 ^ k1)) & _WORD, first
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def row_seeds(step: int, samples: Tensor) -> Tensor:
    """The seeds of the rows of a micro batch, [B] int64, from the step and their global samples [B] int64."""
    return step << 32 | samples & _WORD


def _random_words(stream: Tensor, seeds: Tensor, positions: Tensor, calls: int) -> Tensor:
    """Words of a stream by seeds [B] and positions [B, S], int32 [B, S, 4 C]."""
    row, feature = seeds[:, None, None], torch.arange(calls, device=seeds.device)
    words = philox((feature, positions[..., None], row & _WORD, row >> 32), (stream & _WORD, stream >> 32))
    return torch.stack([word.to(torch.int32) for word in words], -1).flatten(-2)


_drawn = library.custom_op("titan::random_words", _random_words, mutates_args=())
"""The same as one operation, where nothing is compiled: selective recomputation spends 10 us on each it sees."""

_drawn.register_fake(_random_words)


class RandomModule(nn.Module):
    """A module whose forward draws random numbers by position. `ModelSpec.draws` names all modules that do.

    A forward is called as `forward(x, seeds, positions)`: x [B, S, W], seeds [B] int64 from `row_seeds`, None in
    evaluation, and the positions [B, S] of x in their sequences. The same seeds and positions draw the same numbers, so
    use each module in one place. Drawing raises PluginError without seeds, and where x has another shape.

    width: W, numbers per position.
    stream: int64, from the run's seed and the module's canonical name: the key of its numbers. The host sets it.
    """

    stream: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        # A tensor, so that all layers share one compiled graph.
        self.register_buffer("stream", torch.zeros((), dtype=torch.int64), persistent=False)

    def uniform(self, x: Tensor, seeds: Tensor | None, positions: Tensor) -> Tensor:
        """A random number for each of x, float32 [B, S, W]: multiples of 2^-24 from 0 to below 1, equally likely."""
        words = self._words(x, seeds, positions, per_call=4)
        return ((words >> 8) & 0xFFFFFF)[..., : self.width] * 2.0**-24

    def random_bits16(self, x: Tensor, seeds: Tensor | None, positions: Tensor) -> Tensor:
        """16 random bits for each of x, int16 [B, S, W]: all values equally likely, at half the cost of `uniform`."""
        return self._words(x, seeds, positions, per_call=8).view(torch.int16)[..., : self.width]

    def _words(self, x: Tensor, seeds: Tensor | None, positions: Tensor, per_call: int) -> Tensor:
        """Random words, int32 [B, S, 4 C], of as few calls as give `per_call` numbers each."""
        if seeds is None:
            raise PluginError(
                f"a {type(self).__name__} draws random numbers, but its forward was given no seeds: name the module in "
                "ModelSpec.draws, and pass the `seeds` of the model's forward on to it"
            )
        if x.shape != (*positions.shape, self.width):
            raise PluginError(
                f"a {type(self).__name__} draws {self.width} numbers for each of {list(positions.shape)} positions, "
                f"but was given a tensor of shape {list(x.shape)}; hidden units that are split over ranks have no "
                "random numbers: draw before or after the split linears"
            )
        draw = _random_words if torch.compiler.is_compiling() else _drawn
        return draw(self.stream, seeds, positions, -(-self.width // per_call))


class Dropout(RandomModule):
    """Sets features to zero at random while training, and scales the others so that the mean stays (JMLR 15, 2014).

        y = x / (1 - p) where 16 random bits are at least p, as a fraction of 2^16; else 0

    p, at least 0 and below 1, is rounded to a multiple of 2^-16. Backward needs a byte per number. In evaluation y = x.
    """

    def __init__(self, width: int, p: float) -> None:
        super().__init__(width)
        self._zeroed = min(round(p * 2**16), 2**16 - 1)

    def forward(self, x: Tensor, seeds: Tensor | None, positions: Tensor) -> Tensor:
        """x [B, S, W], seeds [B], positions [B, S] -> [B, S, W] in x's dtype."""
        if not self.training:
            return x
        kept = self.random_bits16(x, seeds, positions) >= self._zeroed - 2**15
        return torch.where(kept, x * (2**16 / (2**16 - self._zeroed)), 0.0)


class Jitter(RandomModule):
    """Multiplies features by random factors near 1 while training, as of what a router sees (arXiv 2101.03961).

    y = x (1 + jitter (2 u - 1)), u uniform from 0 to below 1; in evaluation y = x
    """

    def __init__(self, width: int, jitter: float) -> None:
        super().__init__(width)
        self._jitter = jitter

    def forward(self, x: Tensor, seeds: Tensor | None, positions: Tensor) -> Tensor:
        """x [B, S, W], seeds [B], positions [B, S] -> [B, S, W], in float32 while training."""
        if not self.training:
            return x
        return x.float() * (1 + self._jitter * (2 * self.uniform(x, seeds, positions) - 1))


_UNFUSED_BYTES = 180
"""Bytes per number of `random_bits16` that separate integer operations move: 0.125 calls of 7.5 rounds at 176 bytes."""


def dropout_cost(dim: int) -> Elementwise:
    """`Dropout` of hidden states: one pass forward and one backward, and the saved mask of a byte per number."""
    mask = SavedTensor(numel=dim, region="hidden", itemsize=1)
    return Elementwise(
        region="hidden", forward=2 * dim, backward=2 * dim, unfused_bytes=_UNFUSED_BYTES * dim, saved=(mask,)
    )


def jitter_cost(dim: int) -> Elementwise:
    """`Jitter` of hidden states inside a mixture, where they are whole: the factors are saved in float32."""
    factors = SavedTensor(numel=dim, region="seq_full", itemsize=4)
    return Elementwise(
        region="seq_full", forward=4 * dim, backward=4 * dim, unfused_bytes=2 * _UNFUSED_BYTES * dim, saved=(factors,)
    )
