"""The starts of a run that meets faults (`tests.chaos`): layout, way to start, fault and moment, drawn at random."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from tests.injection import KINDS, Fault, drawn, rank_of

LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "dp_shard 2": (2, ("dp_shard",)),
    "dp_replicate 2": (2, ("dp_replicate",)),
    "tp 2": (2, ("tp",)),
    "pp 2": (2, ("pp",)),
    "dp_shard 2, tp 2": (4, ("dp_shard", "tp")),
    "dp_shard 2, pp 2": (4, ("dp_shard", "pp")),
}

OFTEN = (4, 4, 2, 3, 3, 1, 1)
"""How often each layout is taken, against the others: four ranks cost most."""

MOMENTS = {"step": 28, "mkdir": 6, "write": 14, "fsync": 14, "cut": 14, "rename": 9, "remove": 24, "read": 9}
"""Latest event of each kind that a kill waits for."""

RANKS, LAUNCHER, COMMAND = "ranks", "launcher", "command"
"""Ways to start a run."""


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    layout: str
    way: str
    fault: Fault
    words: tuple[str, ...] = ()

    @property
    def keeps_all(self) -> bool:
        """Whether the run never removes a checkpoint."""
        return any(pair == ("--checkpoint.keep_latest", "0") for pair in pairwise(self.words))


def layouts_of_starts(rng: random.Random) -> Iterator[str]:
    """The layout of each start: one for all, or another each time."""
    fixed = rng.random() < 0.5
    while True:
        layout = rng.choices(list(LAYOUTS), OFTEN)[0]
        yield layout
        while fixed:
            yield layout


def drawn_start(rng: random.Random, layout: str, words: list[str]) -> Start:
    ranks = LAYOUTS[layout][0]
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    if kind != "kill":
        return Start(layout, rng.choices((LAUNCHER, COMMAND), (4, 1))[0], drawn(rng, kind, ranks), tuple(words))
    way = rng.choices((RANKS, LAUNCHER, COMMAND), (7, 2, 1))[0]
    if rng.random() < 0.25:
        victims = ("rank", "all") if way != COMMAND else ("rank", "launcher", "all")
        fault = Fault("outside", rng.randint(1, 150 * ranks), rng.randrange(ranks), rng.choice(victims), slow=0.003)
    else:
        point = rng.choice(list(MOMENTS))
        launched = way == LAUNCHER or (way == COMMAND and ranks > 1)
        victim = rng.choice(("rank", "launcher")) if launched else "rank"
        rank = rank_of(rng, point, ranks)
        fault = Fault(point, rng.randint(1, MOMENTS[point]), rank, victim, rng.choice((0.0, 0.003)))
    return Start(layout, way, fault, tuple(words))


def with_caches(starts: list[Start], cache: str) -> list[Start]:
    """A corpus is read while it is tokenized: one that is to grow goes into a new cache, which later starts use."""
    made: list[Start] = []
    found: tuple[str, ...] = ()
    for number, start in enumerate(starts):
        if start.fault.kind == "growth":
            found = ("--data.cache", f"{cache}-{number}")
        made.append(replace(start, words=(*start.words, *found)))
    return made


def flag(key: str, value: object) -> list[str]:
    return [f"--{key}", str(value)]
