"""Text that is generated: what the cache remembers, what is drawn, what is shown (inference/generation.py)."""

import io
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.huggingface import plugin
from tests.logits import logits_of
from titan.contracts import BuildContext, Delimiters, Model, ModelPart
from titan.contracts.base.layout import Layout
from titan.contracts.base.mesh import Mesh
from titan.errors import ConfigError, DataError, DivergedError
from titan.inference import generation
from titan.inference.cache import Cache, cores_of
from titan.inference.commands import generate
from titan.inference.generation import Sampling, Text, Words
from titan.layers.attention import AttentionCore
from titan.plugins.tokenizers.byte import END, Byte
from titan.training.engine import SequentialEngine, Strict

SIZES: dict[str, Any] = {"n_layers": 2, "dim": 32, "n_heads": 4, "ffn_dim": 48, "vocab_size": 257, "max_seq_len": 24}
MODELS: dict[str, Model] = {
    "llama": plugin("llama", **SIZES),
    "llama, grouped": plugin("llama", **SIZES, n_kv_heads=2),
    "llama, window": plugin("llama", **SIZES, n_kv_heads=2, sliding_window=5),
    "gpt, grouped": plugin("gpt", **SIZES, n_kv_heads=2),
    "gpt, dropout": plugin("gpt", **SIZES, dropout=0.5),
    "qwen3, grouped": plugin("qwen3", **SIZES, n_kv_heads=2, head_dim=12),
    "olmo2, grouped": plugin("olmo2", **SIZES, n_kv_heads=2),
    "bloom, grouped": plugin("bloom", **{**SIZES, "dim": 64, "n_heads": 8}, n_kv_heads=4),
    "gemma, grouped": plugin("gemma", **SIZES, n_kv_heads=2, head_dim=12, sliding_window=5, query_scale=7),
    "neox, grouped": plugin("neox", **SIZES, n_kv_heads=2, rotary_pct=0.5),
}
PROMPTS = [list(b"the cat"), list(b"a"), list(b"sat on the"), list(b"on")]
GREEDY = Sampling(max_new_tokens=8, temperature=0.0)
DRAWN = Sampling(max_new_tokens=8, temperature=1.0, seed=3)


def net(model: Model, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    module = model.build().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.25)
    return module.to(dtype)


def context(model: Model, module: nn.Module) -> BuildContext:
    mesh, spec = Mesh(Layout((), {}), torch.device("cpu"), 0), model.spec()
    if isinstance(module, Forgetful):
        spec = replace(spec, attention=())
    job = SimpleNamespace(tokenizer=Byte(Byte.Config()), data=SimpleNamespace(seq_len=16), spec=spec)
    nothing: Any = None
    return BuildContext(job, mesh, spec, precision=nothing, parts=[ModelPart(module)])  # type: ignore[arg-type]


def run(
    model: Model, prompts: Sequence[Sequence[int]], sampling: Sampling, module: nn.Module | None = None, **more: Any
) -> list[Text]:
    here = context(model, module or net(model))
    return generation.generate(here, SequentialEngine(here.parts[0], ()), prompts, sampling, **more)


class Forgetful(nn.Module):
    """A model whose spec names no attention; counts the tokens that it is given."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.tokens = module, 0

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        self.tokens += x.shape[1]
        return self.module(x, positions, documents)  # type: ignore[no-any-return]


def read_prompts(content: bytes, path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    path.write_bytes(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    wanted: Any = {"prompt": ["-"]} if source == "--prompt -" else {"prompt_file": str(path) if source == "" else "-"}
    return list(generate._prompts(Namespace(**{"prompt": None, **wanted})))


@pytest.mark.parametrize("source", ["", "--prompt-file -", "--prompt -"])
def test_prompts_are_the_same_from_every_system(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of a file without their ends, however they end; all of stdin without the line end that `echo` adds."""
    for end in ("\n", "\r\n", "\r"):
        for mark in ("", "\ufeff"):
            content = f"{mark}  größer {end}{end}b\fc{end}"
            whole = f"  größer {end}{end}b\fc"
            got = read_prompts(content.encode(), tmp_path / "a.txt", source, monkeypatch)
            assert got == ([whole] if source == "--prompt -" else ["  größer ", "b\fc"])
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(DataError, match=r"^(stdin|.*/a\.txt): is UTF-(16|32), not UTF-8; convert the file: iconv"):
            read_prompts("hello\r\n".encode(encoding), tmp_path / "a.txt", source, monkeypatch)
    with pytest.raises(DataError, match=r"^(stdin|.*/a\.txt): not UTF-8 at byte 2"):
        read_prompts(b"Gr\xf6\xdfer", tmp_path / "a.txt", source, monkeypatch)


def test_a_prompt_file_that_git_lfs_has_not_fetched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0a' * 32}\nsize 5000\n".encode()
    with pytest.raises(DataError, match=r"a\.txt is a Git LFS pointer, not the file itself \(5,000 bytes\)"):
        read_prompts(pointer, tmp_path / "a.txt", "", monkeypatch)
    assert read_prompts(pointer, tmp_path / "a.txt", "--prompt -", monkeypatch) == [pointer.decode()[:-1]]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_logits_with_a_cache_are_those_of_the_whole_text(model: Model, dtype: torch.dtype, tolerance: float) -> None:
    """Rows of 3, 9 and 6 tokens, padded to 9, then four more each: one, two together, and the last."""
    module, lengths = net(model, dtype), [3, 9, 6]
    with torch.no_grad():
        tokens = torch.randint(0, 256, (3, 13), generator=torch.Generator().manual_seed(1))
        whole = logits_of(module, tokens)
        scale = whole.abs().max()
        expected = whole / scale
        cache, begun = Cache(16), tokens[:, :9].clone()
        for row, length in enumerate(lengths):
            begun[row, length:] = 77
        with cache.attached(module):
            got = module(begun, cache.place([0, 0, 0], 9, tokens.device)) / scale
        for row, length in enumerate(lengths):
            torch.testing.assert_close(got[row, :length], expected[row, :length], rtol=0, atol=tolerance)
        for step, width in ((0, 1), (1, 2), (3, 1)):
            starts = [length + step for length in lengths]
            window = torch.stack([tokens[row, start : start + width] for row, start in enumerate(starts)])
            with cache.attached(module):
                got = module(window, cache.place(starts, width, tokens.device)) / scale
            wanted = torch.stack([expected[row, start : start + width] for row, start in enumerate(starts)])
            torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens of each row a cache was told of, forward by forward."""
    found: list[int] = []
    place = Cache.place
    monkeypatch.setattr(Cache, "place", lambda self, *args: found.append(args[1]) or place(self, *args))
    return found


def test_a_cache_has_room_for_its_length() -> None:
    with pytest.raises(AssertionError, match="17 tokens, the cache has room for 16"):
        Cache(16).place([3, 15], 2, torch.device("cpu"))


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_text_with_a_cache_is_that_without(model: Model, sampling: Sampling) -> None:
    forgetful = Forgetful(net(model))
    whole = [text.ids for text in run(model, PROMPTS, sampling, forgetful)]
    assert forgetful.tokens == sum(range(10, 18)), "all of the longest text, for each token"
    assert [text.ids for text in run(model, PROMPTS, sampling)] == whole
    assert len({tuple(ids[-8:]) for ids in whole}) == 4, "all prompts go on alike: this test would see little"


def test_each_token_costs_itself_alone(widths: list[int]) -> None:
    run(MODELS["llama"], PROMPTS, GREEDY)
    assert widths == [10, 1, 1, 1, 1, 1, 1, 1]


def test_a_run_that_is_held_to_its_contract_generates_with_a_cache_too() -> None:
    here = context(MODELS["llama"], net(MODELS["llama"]))
    direct = SequentialEngine(here.parts[0], ())
    held = Strict(direct, torch.device("cpu"))
    assert all(generation._Model(here, engine, ())._caching for engine in (held, direct))


class Halved(AttentionCore):
    """Attention of a model's own, of which the cache knows nothing."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        return super().attend(q, k, v, positions, documents) / 2


def test_a_model_with_attention_of_its_own_generates_without_a_cache() -> None:
    model, module = MODELS["llama"], net(MODELS["llama"])
    plain = [text.ids for text in run(model, PROMPTS, GREEDY, module)]
    for core in cores_of(module):
        core.__class__ = Halved
    here = context(model, module)
    assert not generation._Model(here, SequentialEngine(here.parts[0], ()), ())._caching
    found = [text.ids for text in run(model, PROMPTS, GREEDY, module)]
    assert found == [text.ids for text in run(model, PROMPTS, GREEDY, Forgetful(module))]
    assert found != plain, "half of the attention draws the same text: this test would see little"


@pytest.mark.parametrize("split", [4, 8])
def test_hidden_states_that_are_split_get_an_even_length(split: int, widths: list[int]) -> None:
    """8 is longer than some of the prompts and texts."""
    model = MODELS["llama, grouped"]
    here = context(model, net(model))
    here.parts[0].length_multiple = split
    texts = generation.generate(here, SequentialEngine(here.parts[0], ()), PROMPTS, GREEDY)
    assert [text.ids for text in texts] == [text.ids for text in run(model, PROMPTS, GREEDY)]
    assert {width % split for width in widths[:8]} == {0}
    assert widths[1:8] == [split] * 7


def test_a_text_stops_at_the_end_id_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    free = run(MODELS["llama"], PROMPTS, GREEDY)
    halt = free[0].tokens[3]
    monkeypatch.setattr(Byte, "end", halt)
    texts = run(MODELS["llama"], PROMPTS, GREEDY)
    for text, whole in zip(texts, free, strict=True):
        cut = whole.tokens.index(halt) if halt in whole.tokens else 8
        assert text.tokens == whole.tokens[:cut]
        assert text.stopped == ("end" if cut < 8 else "max_new_tokens")
    assert texts[0].stopped == "end" and len({text.stopped for text in texts}) == 2


def test_a_text_stops_where_the_model_ends() -> None:
    texts = run(MODELS["gpt, grouped"], PROMPTS, replace(GREEDY, max_new_tokens=20))
    assert [len(text.ids) for text in texts] == [24, 21, 24, 22]
    assert [text.stopped for text in texts] == ["max_seq_len", "max_new_tokens", "max_seq_len", "max_new_tokens"]


def test_a_text_stops_where_the_layout_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """24 tokens are no multiple of 10, into which this layout splits a text."""
    model = MODELS["gpt, grouped"]
    here = context(model, net(model))
    here.parts[0].length_multiple = 10
    texts = _all_of(here, PROMPTS)
    assert [(len(text.ids), text.stopped) for text in texts] == [(20, "max_seq_len")] * 4
    stopped = "stopped at the model's max_seq_len, 24 tokens with the prompt"
    generate._close(texts, here.job, 2.0)  # type: ignore[arg-type]
    told = "60 tokens in 2.0 s, 30.0 tokens/s"
    assert capsys.readouterr().err == f"{told}\n{stopped}; this layout splits no more than 20 of them evenly\n"
    here.parts[0].length_multiple = 1
    generate._close(_all_of(here, PROMPTS[:1]), here.job, 2.0)  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines()[1:] == [stopped]
    here.parts[0].length_multiple = 10
    assert len(generation.encode(here.job, "x" * 20, here.job.tokenizer.delimiters)) == 20  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a prompt has 20 tokens; this layout supports at most 20"):
        _all_of(here, [[120] * 20])


def _all_of(here: BuildContext, prompts: Sequence[Sequence[int]]) -> list[Text]:
    """Texts that end where nothing but their length ends them."""
    sampling = replace(GREEDY, max_new_tokens=24)
    return generation.generate(here, SequentialEngine(here.parts[0], ()), prompts, sampling)


def test_a_prompt_is_encoded_or_refused() -> None:
    job: Any = context(MODELS["llama"], nn.Identity()).job
    assert generation.encode(job, "x" * 23, job.tokenizer.delimiters) == (120,) * 23
    assert generation.encode(job, "", job.tokenizer.delimiters) == (END,)
    assert generation.encode(job, "", Delimiters(7, (), (), (END,))) == (7,)
    assert generation.encode(job, "x", Delimiters(7, (7, 8), (9,), (END,))) == (7, 8, 120, 9)
    with pytest.raises(ConfigError, match=r"has 24 tokens; .* max_seq_len = 24"):
        generation.encode(job, "x" * 24, job.tokenizer.delimiters)
    with pytest.raises(ConfigError, match=r"24 tokens; .* at most 24"):
        run(MODELS["llama"], [[1] * 24], GREEDY)
    small: Any = context(plugin("llama", **{**SIZES, "vocab_size": 100}), nn.Identity()).job
    told = r"token id 120 \('x'\), but the model's vocab_size is 100: it has no row for it"
    with pytest.raises(ConfigError, match=told):
        generation.encode(small, "ax", small.tokenizer.delimiters)


def test_logits_that_are_no_numbers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net(MODELS["llama"])
    with torch.no_grad():
        module.get_parameter("norm.weight")[0] = torch.nan
    for sampling in (GREEDY, DRAWN):
        with pytest.raises(DivergedError, match="NaN"):
            run(MODELS["llama"], PROMPTS, sampling, module)


LOGITS = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]]).log()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"temperature": 1e-30}, [0, 1, 0, 0]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 3}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.05}, [0, 1, 0, 0]),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        # Two of the three hold 25 / 29 = 0.862; of all four they would hold 0.833, and a third would be kept.
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.86}, [0, 16 / 25, 0, 9 / 25]),
    ],
)
def test_probabilities(options: dict[str, float], expected: list[float]) -> None:
    found = Sampling(**{"temperature": 1.0, **options}).probabilities(LOGITS + 50)  # type: ignore[arg-type]
    torch.testing.assert_close(found[0], torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-6)


def test_of_equally_probable_tokens_no_more_are_kept_than_asked_for_and_draws_follow_probabilities() -> None:
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.5)):
        assert sorted(sampling.probabilities(LOGITS)[1].tolist()) == pytest.approx([0, 0, 0.5, 0.5])
    text, expected = Text((1,), 0, 5), torch.tensor([0.1, 0.4, 0.2, 0.3])
    counts = torch.bincount(torch.tensor([text.draw(expected) for _ in range(4000)]), minlength=4)
    torch.testing.assert_close(counts / 4000, expected, rtol=0, atol=0.03)  # four standard deviations


def test_a_seed_says_which_text() -> None:
    """Whatever else is in the batch, and however many turns it takes."""
    three = replace(DRAWN, samples=3)
    texts = [text.tokens for text in run(MODELS["llama"], PROMPTS, three)]
    assert texts == [text.tokens for text in run(MODELS["llama"], PROMPTS, three)]
    assert len({tuple(tokens) for tokens in texts}) == 12
    alone = run(MODELS["llama"], [PROMPTS[2]], three)
    assert [text.tokens for text in alone] == texts[6:9]
    assert run(MODELS["llama"], [PROMPTS[2]], replace(DRAWN, seed=4))[0].tokens not in texts
    many = run(MODELS["llama"], [PROMPTS[0]] * generation.ROWS + [PROMPTS[2]], DRAWN)
    assert many[-1].tokens == texts[6]


def test_training_mode_is_as_before() -> None:
    module = net(MODELS["llama"]).train()
    run(MODELS["llama"], PROMPTS[:1], GREEDY, module)
    assert module.training and all(inner.training for inner in module.modules())


def test_tokens_are_told_as_they_come() -> None:
    told: list[tuple[int, int]] = []
    texts = run(MODELS["llama"], PROMPTS, GREEDY, watch=lambda number, token: told.append((number, token)))
    assert [number for number, _ in told[:4]] == [0, 1, 2, 3]
    for number, text in enumerate(texts):
        assert [token for at, token in told if at == number] == text.tokens


@pytest.mark.parametrize("text", ["größer", "naïve — 漢字 🙂!", "\N{REPLACEMENT CHARACTER} is a character"])
def test_words_come_whole(text: str) -> None:
    tokenizer, prompt = Byte(Byte.Config()), list("é, ".encode())
    words = Words(tokenizer, prompt)
    pieces = [words.add(token) for token in text.encode()]
    assert "".join([*pieces, words.rest()]) == text
    allowed = 1 if text.startswith(generation.BROKEN) else 0
    assert sum(piece.count(generation.BROKEN) for piece in pieces) == allowed
    assert words.rest() == ""


def test_broken_characters_are_shown_once_they_are_certain() -> None:
    words = Words(Byte(Byte.Config()), [])
    assert [words.add(token) for token in (0xC3, 0x28, 0xE6, 0xBC)] == ["", "\N{REPLACEMENT CHARACTER}(", "", ""]
    assert words.rest() == "\N{REPLACEMENT CHARACTER}"
