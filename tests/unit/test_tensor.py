"""What `[plugins.tensor]` refuses before anything starts."""

from types import SimpleNamespace

import pytest

from titan.contracts import Axis
from titan.contracts.base.layout import Layout
from titan.plugins.models.llama import Llama, LlamaConfig
from titan.plugins.parallel.tensor import TensorConfig, TensorParallel

CP = Axis(name="cp", data="sliced", weights="copies", topology_order=30, doc="")


def _sentences(tp: int, cp: int = 1, seq_len: int = 16, sequence_parallel: bool = True, **sizes: int) -> list[str]:
    layout = Layout((CP, *TensorParallel.axes), {"cp": cp, "tp": tp})
    job = SimpleNamespace(layout=layout, data=SimpleNamespace(seq_len=seq_len))
    spec = Llama(LlamaConfig(**{"dim": 96, "n_heads": 12, "n_kv_heads": 6, "vocab_size": 251, **sizes})).spec()
    return list(TensorParallel(TensorConfig(sequence_parallel=sequence_parallel)).check(job, spec))  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2])
def test_what_fits_is_not_refused(tp: int) -> None:
    assert _sentences(tp) == []


def test_one_rank_splits_nothing() -> None:
    assert _sentences(1, cp=2, seq_len=15) == []


def test_heads_must_come_out_even_and_the_nearest_degrees_are_named() -> None:
    assert _sentences(4) == ["[model] n_kv_heads = 6 cannot be split over mesh.tp = 4; nearest tp that fits: 3 or 6"]
    both = _sentences(5, seq_len=20)
    assert [sentence.split(" cannot")[0] for sentence in both] == ["[model] n_kv_heads = 6", "[model] n_heads = 12"]


def test_heads_that_are_not_grouped_are_named_once() -> None:
    expected = "[model] n_heads = 12 cannot be split over mesh.tp = 8; nearest tp that fits: 6 or 12"
    assert _sentences(8, n_kv_heads=12) == [expected]


def test_sequences_must_come_out_even_only_where_they_are_split() -> None:
    (sentence,) = _sentences(2, cp=2, seq_len=18)
    assert sentence == (
        "[data] seq_len = 18 cannot be split over mesh.tp = 2 times 2 other ranks of a sequence; "
        "nearest seq_len that fits: 16 or 20, or set sequence_parallel = false"
    )
    assert _sentences(2, seq_len=17, sequence_parallel=False) == []


def test_every_rank_needs_a_word() -> None:
    expected = "[model] vocab_size = 8 leaves some of the mesh.tp = 6 ranks without a word"
    assert _sentences(6, seq_len=18, vocab_size=8) == [expected]
    assert _sentences(6, seq_len=18, vocab_size=11) == []


def test_every_rank_needs_a_hidden_unit() -> None:
    expected = "[model] ffn_dim = 15 leaves some of the mesh.tp = 6 ranks without a hidden unit"
    assert _sentences(6, seq_len=18, ffn_dim=15) == [expected]
    assert _sentences(6, seq_len=18, ffn_dim=16) == []
