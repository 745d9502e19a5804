"""Token shards on many ranks: rank 0 reads each header once, and a rank opens the shards that its samples need."""

import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.scale.shards import measure
from tests.jobs import LLAMA
from tests.sweeps import swept_case
from tests.unit.test_data_shards import write
from titan.config import load_job
from titan.data.open import open_data
from titan.data.samples.loader import Loader
from titan.errors import DataError
from titan.ranks import process
from titan.testing.jobs import write_text
from titan.testing.ranks import run_ranks

RANKS, SHARDS, TOKENS, LENGTH, STEPS, BATCH = 2, 12, 40, 16, 3, 8
ORDERED = ["--data.name", "shards", "--data.shuffle", "false", "--data.seq_len", str(LENGTH)]


@dataclass
class Opened:
    """What this process has opened and listed since it began to count, by the name of the file or folder."""

    files: Counter[str] = field(default_factory=Counter)
    folders: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        sys.addaudithook(self._heard)  # lasts as long as the process, which is the test's own

    def _heard(self, event: str, about: tuple[object, ...]) -> None:
        if event in ("open", "os.scandir", "os.listdir") and isinstance(about[0], str | Path):
            (self.files if event == "open" else self.folders).update([Path(about[0]).name])


def shards_of(folder: Path, count: int) -> Path:
    """Shards of TOKENS tokens each, which count up through all of them."""
    folder.mkdir()
    for number in range(count):
        ids = [(number * TOKENS + n) % 250 for n in range(TOKENS)]
        write(folder / f"{folder.name}-{number:02}.bin", [ids], vocab_size=257)
    return folder


def _counted(words: list[str], workers: int) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """On one rank: the files opened and the folders listed until the data is open, and the files opened in all."""
    job = load_job(LLAMA, words, RANKS)
    rank = process.join(job)
    opened = Opened()
    samples, validation = open_data(job, rank)
    assert validation is not None and len(validation) == 4
    at_start = opened.files.copy()
    loader = Loader(
        samples,
        global_batch=BATCH,
        micro_batch=BATCH // RANKS,
        first=0,
        index=rank.number,
        ranks=RANKS,
        workers=workers,
        device=rank.device,
    )
    for step in range(STEPS):
        first = (step * BATCH + rank.number * BATCH // RANKS) * LENGTH
        tokens = next(loader)[0].tokens.flatten().tolist()
        assert tokens == [n % 250 for n in range(first, first + BATCH // RANKS * LENGTH)]
    loader.close()
    return at_start, opened.folders, opened.files


def needed(rank: int) -> set[str]:
    """The shards of all samples of a rank. A sample has the label of its last token, one token further on."""
    samples = [step * BATCH + rank * BATCH // RANKS + n for step in range(STEPS) for n in range(BATCH // RANKS)]
    tokens = [g * LENGTH + n for g in samples for n in range(LENGTH + 1)]
    return {f"train-{token // TOKENS:02}.bin" for token in tokens}


@pytest.mark.parametrize("workers", [0, swept_case(1)])
def test_each_header_is_read_once_and_a_rank_maps_what_its_samples_need(tmp_path: Path, workers: int) -> None:
    train, validation = shards_of(tmp_path / "train", SHARDS), shards_of(tmp_path / "validation", 2)
    words = [*ORDERED, "--data.path", str(train), "--mesh.dp_shard", str(RANKS), "--run.dir", str(tmp_path)]
    words += ["--validation.every", "1", "--validation.name", "shards", "--validation.path", str(validation)]
    found = run_ranks(_counted, RANKS, [*words, "--train.global_batch_size", str(BATCH)], workers, init=False)
    headers = Counter(path.name for folder in (train, validation) for path in folder.iterdir())
    for rank, (at_start, listed, in_all) in enumerate(found):
        own = {name: times for name, times in at_start.items() if name.endswith(".bin")}
        assert own == (headers if rank == 0 else {}), f"rank {rank}"
        assert sum(listed[folder] for folder in ("train", "validation")) == (2 if rank == 0 else 0)
        read = {name: times - at_start[name] for name, times in in_all.items() if name.endswith(".bin")}
        mapped = {name for name, times in read.items() if times}
        assert mapped == (set() if workers else needed(rank)), f"rank {rank}"
        assert set(read.values()) <= {0, 1}
    assert len({frozenset(needed(rank)) for rank in range(RANKS)}) == RANKS, "ranks that need the same show nothing"


def test_the_bench_counts_the_same() -> None:
    counted = measure(2, 3)
    assert counted["opens_at_start_by_rank"] == [3, 0] and counted["opens_per_shard_at_start"]["after"] == 1
    large = counted["large"]
    assert large["opens_at_start"] == {"before": 2 * large["shards"] * large["ranks"], "after": large["shards"]}
    assert 2_800_000 < large["bytes_sent_to_each_rank"] < 3_300_000


def _refused(words: list[str]) -> str:
    job = load_job(LLAMA, words, 2)
    with pytest.raises(DataError) as raised:
        open_data(job, process.join(job))
    return str(raised.value)


def test_what_rank_0_finds_wrong_is_raised_on_all(tmp_path: Path) -> None:
    train = shards_of(tmp_path / "train", 3)
    (train / "train-01.bin").write_bytes((train / "train-01.bin").read_bytes()[:-1])
    words = [*ORDERED, "--data.path", str(train), "--run.dir", str(tmp_path)]
    said = run_ranks(_refused, 2, words, init=False)
    assert said[0] == said[1] and said[0].startswith(f"shard {train}/train-01.bin is cut short: 151 bytes, but")


def _on_a_node_of_its_own(folder: str, lost: bool) -> tuple[str, list[int]]:
    """On one rank, which is alone on a node with a disk of its own: what is wrong, and tokens of its first sample."""
    os.environ["LOCAL_RANK"] = "0"
    os.chdir(Path(folder, os.environ["RANK"]))
    job = load_job(LLAMA, ["--data.cache", "cache", "--data.path", "text", "--run.dir", folder], 2)
    rank = process.join(job)
    try:
        samples, _ = open_data(job, rank)
        if lost and rank.number == 1:
            next(Path("cache").glob("*/shard-*.bin")).unlink()
        return "", samples[0].tokens.tolist()
    except DataError as error:
        return str(error), []


def test_a_node_whose_cache_lacks_the_tokens_makes_its_own(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_text(tmp_path / str(rank) / "text")
    first, second = run_ranks(_on_a_node_of_its_own, 2, str(tmp_path), False, init=False)
    assert first == second and first[1]
    assert len(list(tmp_path.glob("[01]/cache/*/shard-00000.bin"))) == 2
    _, (said, _) = run_ranks(_on_a_node_of_its_own, 2, str(tmp_path), True, init=False)
    assert said.startswith("shard cache/")
    assert said.endswith("shard-00000.bin cannot be read: No such file or directory")


def test_nodes_that_find_other_samples_do_not_train(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_text(tmp_path / str(rank) / "text")
    (tmp_path / "1" / "text" / "late.txt").write_text("a file that only the second node sees")
    (said, _), (again, _) = run_ranks(_on_a_node_of_its_own, 2, str(tmp_path), False, init=False)
    assert said == again
    assert "found other samples of dataset 'text' than the node of rank 0: files of the dataset" in said
