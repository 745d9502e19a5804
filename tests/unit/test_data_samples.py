"""Samples and batches: packing, sources, and a loader whose only state is a number."""

import hashlib
import pickle
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch

from tests.unit.test_data_shards import DOCUMENTS, write
from titan.contracts import IGNORE
from titan.data.samples.loader import Copies, Loader
from titan.data.samples.samples import Packing, Sample, Samples
from titan.data.tokens import shards as tokens
from titan.data.tokens.shards import Shard, open_shard, open_shards
from titan.errors import DataError

CPU = torch.device("cpu")


def samples(
    *sources: tuple[list[Path], float], packing: Packing = "concat", shuffle: bool = False, **more: Any
) -> Samples:
    options = {"seq_len": 4, "seed": 1, "vocab_size": 100, **more}
    opened = [(open_shards(paths), weight) for paths, weight in sources]
    return Samples(opened, packing=packing, shuffle=shuffle, **options)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """1 2 3 0 | 4 0 | 5 6 7 8 9 0, the first document in a shard of its own."""
    return [write(tmp_path / "0.bin", DOCUMENTS[:1]), write(tmp_path / "1.bin", DOCUMENTS[1:])]


def count_up(path: Path, tokens: int, start: int = 0) -> list[Path]:
    return [write(path, [[start + n for n in range(tokens)]], vocab_size=100_000)]


def as_lists(sample: Sample) -> list[Any]:
    return [None if column is None else column.tolist() for column in sample[:3]]


def test_concatenated_windows_meet_without_gap(shards: list[Path]) -> None:
    packed = samples((shards, 1.0))
    assert len(packed) == 2
    assert as_lists(packed[0]) == [[1, 2, 3, 0], [2, 3, 0, 4], None]
    assert as_lists(packed[1]) == [[4, 0, 5, 6], [0, 5, 6, 7], None]
    assert as_lists(packed[2]) == as_lists(packed[0])
    assert all(column.dtype == torch.int64 for column in packed[0] if column is not None)
    assert packed[0].length is None and samples((shards, 1.0), packing="document_mask")[0].length is None


@pytest.mark.parametrize("packing", ["concat", "document_mask", "pad"])
def test_the_fingerprint_is_of_what_the_samples_depend_on(shards: list[Path], packing: Packing) -> None:
    parts = [4, packing, 1, False, 1024, *(open_shard(path).digest for path in shards)]
    assert samples((shards, 1.0), packing=packing).fingerprint == hashlib.sha256(repr(parts).encode()).hexdigest()


def test_document_mask_numbers_documents_and_hides_what_follows_one(shards: list[Path]) -> None:
    packed = samples((shards, 1.0), packing="document_mask")
    assert as_lists(packed[0]) == [[1, 2, 3, 0], [2, 3, 0, IGNORE], [0, 0, 0, 0]]
    assert as_lists(packed[1]) == [[4, 0, 5, 6], [0, IGNORE, 6, 7], [0, 0, 1, 1]]
    whole = samples((shards, 1.0), packing="document_mask", seq_len=11)[0]
    labels = [2, 3, 0, IGNORE, 0, IGNORE, 6, 7, 8, 9, 0]
    assert as_lists(whole) == [[1, 2, 3, 0, 4, 0, 5, 6, 7, 8, 9], labels, [0] * 4 + [1] * 2 + [2] * 5]


def test_pad_gives_a_document_a_sample_and_cuts_long_ones(shards: list[Path]) -> None:
    packed = samples((shards, 1.0), packing="pad")
    assert len(packed) == 4
    assert as_lists(packed[0]) == [[1, 2, 3, 0], [2, 3, 0, IGNORE], None]
    assert as_lists(packed[1]) == [[4, 0, 0, 0], [0, IGNORE, IGNORE, IGNORE], None]
    assert as_lists(packed[2]) == [[5, 6, 7, 8], [6, 7, 8, 9], None]
    assert as_lists(packed[3]) == [[9, 0, 0, 0], [0, IGNORE, IGNORE, IGNORE], None]
    assert [packed[g].length for g in range(4)] == [3, 1, 4, 1]  # what is only a label is no input


def test_batches_say_how_long_padded_samples_are(shards: list[Path]) -> None:
    """Always there with this packing: a graph is compiled for tensors that are there, or not."""
    first, second = (next(loader(samples((shards, 1.0), packing=packing)))[0] for packing in ("pad", "concat"))
    assert first.lengths is not None and first.lengths.dtype == torch.int64
    assert first.lengths.tolist() == (first.labels != IGNORE).sum(1).tolist()
    assert second.lengths is None


@pytest.mark.parametrize("seq_len", [2, 3, 5, 6, 11])
def test_pad_learns_every_token_but_the_first_of_each_document_once(shards: list[Path], seq_len: int) -> None:
    packed = samples((shards, 1.0), packing="pad", seq_len=seq_len)
    learnt = [label for g in range(len(packed)) for label in packed[g].labels.tolist() if label != IGNORE]
    assert learnt == [number for ids in DOCUMENTS for number in ids[1:]]


def test_shuffled_epochs_take_each_sample_once(tmp_path: Path) -> None:
    packed = samples((count_up(tmp_path / "a.bin", 401), 1.0), shuffle=True, vocab_size=1000)
    epochs = [[int(packed[e * 100 + i].tokens[0]) // 4 for i in range(100)] for e in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != list(range(100))


def test_the_seed_chooses_the_order(tmp_path: Path) -> None:
    source = (count_up(tmp_path / "a.bin", 401), 1.0)
    shuffled = [samples(source, shuffle=True, vocab_size=1000, seed=seed) for seed in (1, 1, 2)]
    one, same, other = ([int(packed[g].tokens[0]) for g in range(100)] for packed in shuffled)
    assert one == same != other


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    small, large = count_up(tmp_path / "a.bin", 41), count_up(tmp_path / "b.bin", 4001, start=5000)
    packed = samples((small, 3.0), (large, 1.0), shuffle=True, vocab_size=10_000)
    drawn = [int(packed[g].tokens[0]) for g in range(1024)]
    assert sum(number < 5000 for number in drawn) == 768
    assert set(Counter(number for number in drawn if number < 5000).values()) == {76, 77}  # 768 draws of 10 samples
    assert max(Counter(number for number in drawn if number >= 5000).values()) == 1
    assert packed.tokens == 4042


def test_too_little_text_says_how_much(shards: list[Path]) -> None:
    assert len(samples((shards, 1.0), seq_len=11)) == 1
    with pytest.raises(DataError, match=r"seq_len 12: 12 tokens in 3 documents \(.*0\.bin and 1 more\), at least 13"):
        samples((shards, 1.0), seq_len=12)


def test_pad_of_empty_documents_is_too_little(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 tokens in 2 documents .*, a document of at least 2"):
        samples(([write(tmp_path / "a.bin", [[0], [0]])], 1.0), packing="pad")


def test_fingerprint_changes_with_all_that_changes_samples(tmp_path: Path, shards: list[Path]) -> None:
    other = [write(tmp_path / "2.bin", [[1, 2, 3, 9], *DOCUMENTS[1:]])]
    prints = [
        samples((shards, 1.0)).fingerprint,
        samples((shards[::-1], 1.0)).fingerprint,
        samples((other, 1.0)).fingerprint,
        samples((shards, 1.0), seed=2).fingerprint,
        samples((shards, 1.0), seq_len=3).fingerprint,
        samples((shards, 1.0), packing="pad").fingerprint,
        samples((shards, 1.0), shuffle=True).fingerprint,
        samples((shards, 1.0), (other, 1.0)).fingerprint,
        samples((shards, 2.0), (other, 1.0)).fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    moved = [shards[0].rename(tmp_path / "elsewhere.bin"), shards[1]]
    assert samples((moved, 1.0)).fingerprint == prints[0]


def loader(source: Samples, **more: Any) -> Loader:
    numbers = {"global_batch": 12, "micro_batch": 2, "first": 0, "index": 0, "ranks": 1, "workers": 0}
    return Loader(source, **{"device": CPU, **numbers, **more})


@pytest.fixture
def many(tmp_path: Path) -> Samples:
    """Two sources of 50 and 30 samples whose tokens tell which they are."""
    return samples(
        (count_up(tmp_path / "a.bin", 201), 2.0),
        (count_up(tmp_path / "b.bin", 121, 500), 1.0),
        shuffle=True,
        vocab_size=1000,
    )


def tokens_of(loader: Loader, steps: int) -> list[torch.Tensor]:
    return [torch.cat([batch.tokens for batch in next(loader)]) for _ in range(steps)]


def test_steps_take_the_global_order(many: Samples) -> None:
    expected = [torch.stack([many[g].tokens for g in range(step * 12, step * 12 + 12)]) for step in range(3)]
    for micro in (1, 2, 3, 12):
        one = loader(many, micro_batch=micro)
        step = next(one)
        assert [batch.tokens.shape for batch in step] == [(micro, 4)] * (12 // micro)
        torch.testing.assert_close([torch.cat([b.tokens for b in step]), *tokens_of(one, 2)], expected, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_ranks_share_one_order(many: Samples, ranks: int) -> None:
    whole = tokens_of(loader(many), 4)
    parts = [tokens_of(loader(many, index=index, ranks=ranks, micro_batch=1), 4) for index in range(ranks)]
    for step in range(4):
        assert torch.equal(torch.cat([part[step] for part in parts]), whole[step])


@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (3, 2), (12, 1)])
def test_batches_know_their_samples(many: Samples, ranks: int, micro: int) -> None:
    for index in range(ranks):
        of_rank = loader(many, first=24, index=index, ranks=ranks, micro_batch=micro)
        for batch in [batch for _ in range(2) for batch in next(of_rank)]:
            assert batch.samples is not None
            assert torch.equal(batch.tokens, torch.stack([many[g].tokens for g in batch.samples.tolist()]))
            assert batch.samples.min() >= 24 and batch.samples.max() < 48


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_going_on_equals_never_having_stopped(many: Samples, stop: int) -> None:
    whole = tokens_of(loader(many), 6)
    first = loader(many)
    tokens_of(first, stop)
    assert first.state_dict() == {"samples": 12 * stop, "fingerprint": many.fingerprint}
    second = [loader(many, first=first.state_dict()["samples"], index=i, ranks=2) for i in range(2)]
    rest = [tokens_of(half, 6 - stop) for half in second]
    for step in range(6 - stop):
        assert torch.equal(torch.cat([half[step] for half in rest]), whole[stop + step])


def test_labels_and_documents_come_along(shards: list[Path]) -> None:
    packed = samples((shards, 1.0), packing="document_mask")
    batch = next(loader(packed))[0]
    assert batch.labels.tolist() == [packed[0].labels.tolist(), packed[1].labels.tolist()]
    assert batch.documents is not None and batch.documents.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert next(loader(samples((shards, 1.0))))[0].documents is None


@pytest.mark.parametrize(
    ("chosen", "device", "workers"),
    [(None, "cpu", 0), (None, "cuda", 2), (0, "cuda", 0), (0, "cpu", 0), (3, "cpu", 3), (1, "cuda", 1)],
)
def test_a_gpu_has_two_loader_processes_unless_told_otherwise(
    many: Samples, chosen: int | None, device: str, workers: int
) -> None:
    assert loader(many, workers=chosen, device=torch.device(device)).workers == workers


def test_the_loader_leaves_the_random_state_alone(many: Samples) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    tokens_of(loader(many), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gpu_copies_batches_beside_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream of their own, which the computation waits for; their memory is the computation's then."""
    device, cuda = torch.device("cuda", 0), MagicMock()
    monkeypatch.setattr(torch, "cuda", cuda)
    copies, copying, computing = Copies(device), cuda.Stream.return_value, cuda.current_stream.return_value
    cuda.tokens.to.return_value, cuda.labels.to.return_value = columns = cuda.tokens, cuda.labels
    moved = {"device": device, "non_blocking": True}
    for _ in range(2):
        assert copies((*columns, None, None)) == (*columns, None, None)
        cuda.stream.assert_called_with(copying)
        assert cuda.mock_calls[-7:] == [
            *(call.stream().__enter__(), call.tokens.to(**moved), call.labels.to(**moved)),
            *(call.stream().__exit__(None, None, None), call.current_stream().wait_stream(copying)),
            *(call.tokens.record_stream(computing), call.labels.record_stream(computing)),
        ]
    cuda.Stream.assert_called_once_with(device)


@pytest.mark.parametrize("packing", ["concat", "document_mask", "pad"])
def test_a_pickled_copy_maps_the_shards_that_it_reads(
    shards: list[Path], packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other ranks and loader processes are sent: samples 0 and 1 lie in one shard each, or across both."""
    packed = samples((shards, 1.0), packing=packing, seq_len=3)
    opened: list[str] = []
    header, map_ = tokens.open_shard, Shard.map
    monkeypatch.setattr(tokens, "open_shard", lambda path: (opened.append(f"header {path}"), header(path))[1])
    monkeypatch.setattr(Shard, "map", lambda shard: (opened.append(shard.path.name), map_(shard))[1])
    sent = pickle.dumps(packed)
    copy = pickle.loads(sent)
    assert copy.fingerprint == packed.fingerprint and len(copy) == len(packed) and not opened
    read = [as_lists(copy[0])]
    assert opened == ["0.bin"]
    read.append(as_lists(copy[1]))
    assert opened == ["0.bin", "1.bin"]
    assert len(pickle.dumps(copy)) == len(sent), "what a process has mapped and counted is its own"
    assert read == [as_lists(packed[g]) for g in range(2)]


def test_a_bad_token_stops_the_step_that_needs_it(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.bin", [[1] * 100 + [77] * 20], vocab_size=100)]
    one = loader(samples((paths, 1.0), vocab_size=77))
    assert tokens_of(one, 2)[1].max() == 1
    with pytest.raises(DataError, match=r"a\.bin: token 100 is 77, outside the vocabulary of 77"):
        next(one)
