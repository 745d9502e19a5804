"""Random numbers by position: known answers, statistics, and dropout made of them (titan/layers/philox.py)."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.jobs import GPT
from tests.planned import job_of
from titan.config import load_job
from titan.contracts import Batch, BuildContext, ModelPart
from titan.contracts.base.layout import Layout
from titan.contracts.base.mesh import Mesh
from titan.contracts.base.parts import Precision
from titan.errors import ConfigError, PluginError
from titan.layers.philox import Dropout, Jitter, RandomModule, dropout_cost, philox, row_seeds
from titan.planner.step.layout import costs_of
from titan.plugins.models.gpt import Gpt, GptConfig
from titan.training import phases, trainer
from titan.training.engine import evaluating
from titan.training.init import name_seed

B, S, W = 3, 16, 32
CPU = torch.device("cpu")


def _named(module: RandomModule, stream: int = 12345678901234567) -> RandomModule:
    module.stream.fill_(stream)
    return module


def _seeds(step: int = 1, first: int = 0, rows: int = B) -> Tensor:
    return row_seeds(step, torch.arange(first, first + rows))


def _places(rows: int = B, length: int = S) -> Tensor:
    return torch.arange(length).expand(rows, length)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_random123(counter: str, key: str, words: str) -> None:
    given = [[torch.tensor(int(word, 16)) for word in part.split()] for part in (counter, key)]
    assert " ".join(f"{int(word):08x}" for word in philox(*given)) == words


def _by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as the paper has it, in Python's integers."""
    for _ in range(10):
        low, high = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        first, third = (high >> 32) ^ counter[1] ^ key[0], (low >> 32) ^ counter[3] ^ key[1]
        counter = [first, high % 2**32, third, low % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def test_a_number_is_a_function_of_where_it_is_used() -> None:
    """Against Python's integers, at large values of each: a sample beyond 2^32 counts modulo 2^32."""
    stream, step, sample, place = name_seed(7, "layers.3.attn_dropout.stream"), 3_000_000, 2**33 + 5, 131_071
    module = _named(RandomModule(10), stream)
    seeds = row_seeds(step, torch.tensor([sample]))
    numbers = module.uniform(torch.zeros(1, 1, 10), seeds, torch.tensor([[place]]))
    key = [stream % 2**32, stream >> 32]
    words = [word for call in range(3) for word in _by_hand([call, place, 5, step], key)]
    assert numbers.flatten().tolist() == [(word >> 8) / 2**24 for word in words[:10]]
    bits = module.random_bits16(torch.zeros(1, 1, 10), seeds, torch.tensor([[place]]))
    halves = [half for word in words[:8] for half in (word % 2**16, word >> 16)]
    assert bits.flatten().long().remainder(2**16).tolist() == halves[:10]


def test_uniform_numbers_and_random_bits_are_uniform() -> None:
    module = _named(RandomModule(64))
    numbers = module.uniform(torch.empty(64, 64, 64), _seeds(rows=64), _places(64, 64))
    assert numbers.dtype == torch.float32 and numbers.min() >= 0 and numbers.max() < 1
    assert _chi_square(numbers.mul(256).long(), 256) < 330.5  # 255 degrees of freedom, p = 0.001
    assert abs(numbers.mean().item() - 0.5) < 4 * math.sqrt(1 / 12 / numbers.numel())
    bits = module.random_bits16(torch.empty(64, 64, 64), _seeds(rows=64), _places(64, 64)).long() + 2**15
    assert _chi_square(bits >> 8, 256) < 330.5 and _chi_square(bits & 255, 256) < 330.5


def _chi_square(values: Tensor, kinds: int) -> float:
    expected = values.numel() / kinds
    return float(((torch.bincount(values.flatten(), minlength=kinds) - expected) ** 2 / expected).sum())


STREAM = name_seed(1, "layers.0.ffn_dropout.stream")
NEIGHBORS = {
    "feature": lambda numbers, _: (numbers[..., 1:], numbers[..., :-1]),
    "position": lambda numbers, _: (numbers[:, 1:], numbers[:, :-1]),
    "sample": lambda numbers, _: (numbers[1:], numbers[:-1]),
    "step": lambda numbers, other: (numbers, other(step=2)),
    "module": lambda numbers, other: (numbers, other(stream=name_seed(1, "layers.1.ffn_dropout.stream"))),
    "seed": lambda numbers, other: (numbers, other(stream=name_seed(2, "layers.0.ffn_dropout.stream"))),
    "bit of the stream": lambda numbers, other: (numbers, other(stream=STREAM ^ 1)),
}


@pytest.mark.parametrize("kind", ["uniform", "random_bits16"])
@pytest.mark.parametrize("along", NEIGHBORS)
def test_neighbors_are_not_correlated(along: str, kind: str) -> None:
    def draw(step: int = 1, stream: int = STREAM) -> Tensor:
        module = _named(RandomModule(48), stream)
        numbers = getattr(module, kind)(torch.empty(40, 50, 48), _seeds(step, rows=40), _places(40, 50))
        return numbers.double()

    first, second = NEIGHBORS[along](draw(), draw)
    found = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
    assert abs(found) < 4 / math.sqrt(first.numel())
    assert (first == second).double().mean() < 1e-3


def test_any_part_of_a_batch_draws_its_own_numbers() -> None:
    """Rows and positions alone, in any order: what ranks, micro batches and slices of sequences do."""
    module = _named(Dropout(W, 0.5))
    x = torch.ones(B, S, W)
    whole = module(x, _seeds(), _places())
    rows, columns = torch.tensor([2, 0]), torch.tensor([5, 1, 15])
    part = module(x[rows][:, columns], _seeds()[rows], _places()[rows][:, columns])
    assert torch.equal(part, whole[rows][:, columns])


# Inductor imports parts of PyTorch that PyTorch itself warns of.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("width", [W, 7])
def test_compiled_numbers_are_the_same(backend: str, width: int) -> None:
    module = _named(Dropout(width, 0.3))
    x, seeds, places = torch.randn(B, S, width), _seeds(5, 100), _places()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x, seeds, places), module(x, seeds, places))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean(p: float) -> None:
    module = _named(Dropout(64, p))
    y = module(torch.ones(64, 64, 64), _seeds(rows=64), _places(64, 64))
    share = (y == 0).double().mean().item()
    assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / y.numel()) + 2**-17
    kept = 1 - round(p * 2**16) / 2**16  # what is scaled by is what is kept: the expected value is exact
    assert y.max().item() == pytest.approx(1 / kept, rel=1e-7)
    assert abs(y.double().mean().item() - 1) < 4 * math.sqrt(p / (1 - p) / y.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_pass_where_features_did_and_a_byte_is_saved(dtype: torch.dtype) -> None:
    module, saved = _named(Dropout(W, 0.375)), list[Tensor]()
    x = torch.randn(B, S, W, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = module(x, _seeds(), _places())
    y.backward(torch.ones_like(y))
    assert y.dtype == dtype and x.grad is not None
    assert torch.equal(x.grad == 0, y == 0) and torch.equal(x.grad.unique(), y.new_tensor([0, 1 / (1 - 0.375)]))
    [stated] = dropout_cost(W).saved
    assert sum(tensor.nbytes for tensor in saved if tensor.ndim) == stated.numel * stated.itemsize * B * S


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jitter_is_uniform_around_one_and_absent_in_evaluation(dtype: torch.dtype) -> None:
    module, x = _named(Jitter(64, 0.25)), torch.ones(8, 128, 64, dtype=dtype)
    factors = module(x, row_seeds(3, torch.arange(8)), torch.arange(128).expand(8, 128))
    assert factors.dtype == torch.float32 and factors.min() >= 0.75 and factors.max() < 1.25
    assert factors.max() - factors.min() > 0.499  # of 65,536 numbers
    assert abs(factors.mean() - 1) < 4 * 0.5 / 12**0.5 / factors.numel() ** 0.5
    assert module.eval()(x, None, torch.arange(128).expand(8, 128)) is x


def test_no_dropout_in_evaluation() -> None:
    module, x = Dropout(W, 0.9).eval(), torch.randn(B, S, W)
    assert module(x, None, _places()) is x


@pytest.mark.parametrize(
    ("shape", "seeds", "said"),
    [
        ((B, S, W), None, "was given no seeds: name the module in ModelSpec.draws"),
        ((B, S // 2, W), _seeds(), r"for each of \[3, 16\] positions, but was given a tensor of shape \[3, 8, 32\]"),
        ((B, S, W // 2), _seeds(), r"draws 32 numbers .* shape \[3, 16, 16\]; hidden units that are split"),
    ],
    ids=["no seeds", "other positions", "a slice of the features"],
)
def test_numbers_that_would_be_wrong_are_refused(shape: tuple[int, ...], seeds: Tensor | None, said: str) -> None:
    with pytest.raises(PluginError, match=f"a Dropout .*{said}"):
        _named(Dropout(W, 0.5))(torch.ones(shape), seeds, _places())


SIZES = {"n_layers": 2, "dim": 32, "n_heads": 4, "vocab_size": 97, "max_seq_len": 16}


def _context(model: Gpt) -> BuildContext:
    job = replace(load_job(GPT, ["--data.path", "nowhere", "--run.seed", "3"]), model=model)
    mesh = Mesh(Layout((), {}), CPU, 0)
    return BuildContext(job=job, mesh=mesh, spec=model.spec(), precision=Precision())


def test_each_module_has_a_stream_of_its_own() -> None:
    context = _context(Gpt(GptConfig(**SIZES, dropout=0.5)))
    [part] = phases.assemble(context).parts
    streams = {name: int(buffer) for name, buffer in part.module.named_buffers()}
    places = ["embed_dropout", *(f"layers.{i}.{half}_dropout" for i in range(2) for half in ("attn", "ffn"))]
    assert streams == {f"{name}.stream": name_seed(3, f"{name}.stream") for name in places}
    assert len(set(streams.values())) == 5 and not part.module.state_dict().keys() & streams.keys()


def test_evaluation_is_that_of_the_model_without_dropout_and_transformers_is_told() -> None:
    tokens, places = torch.arange(32).view(2, 16), _places(2, 16)
    logits = []
    for p in (0.0, 0.5):
        context = _context(Gpt(GptConfig(**SIZES, dropout=p)))
        parts = phases.assemble(context).parts
        with evaluating(parts):
            logits.append(parts[0].module(tokens, places))
        if p:
            assert not torch.equal(parts[0].module(tokens, places, seeds=_seeds(rows=2)), logits[0])
    assert torch.equal(*logits)
    told = Gpt(GptConfig(**SIZES, dropout=0.125)).hf_config() or {}
    assert [told[f"{name}_pdrop"] for name in ("embd", "resid", "attn")] == [0.125, 0.125, 0.0]


@pytest.mark.parametrize(("p", "said"), [(1.0, "must be below 1"), (-0.1, "must be at least 0"), (1.5, "below 1")])
def test_a_probability_that_is_none_is_refused(p: float, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[model\] dropout.*{said}"):
        load_job(GPT, ["--data.path", "nowhere", "--model.dropout", str(p)])


def test_a_micro_batch_carries_step_and_samples() -> None:
    """Samples begin anew where a run's data does; steps go on."""
    tokens, samples = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([6, 2**32 + 7])
    batch = Batch(tokens, tokens, samples=samples)
    for draws in ((), ("embed_dropout",)):
        run: Any = SimpleNamespace(step=4, context=SimpleNamespace(spec=SimpleNamespace(draws=draws)))
        seeds = trainer._seeded(batch, run).seeds
        assert (seeds is None) if not draws else seeds.tolist() == [5 * 2**32 + 6, 5 * 2**32 + 7]


def test_a_forward_is_given_what_it_has_an_argument_for() -> None:
    tokens, lengths = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([1, 4])
    batch = Batch(tokens, tokens, lengths=lengths, seeds=torch.tensor([3, 5]))
    with torch.device("meta"):
        decoder = Gpt(GptConfig(**SIZES)).build()
    assert ModelPart(decoder).inputs(batch).keys() == {"seeds", "lengths"}
    assert ModelPart(_Deaf()).inputs(batch) == {}


class _Deaf(nn.Module):
    """A model whose forward takes no seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = RandomModule(4)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        return x


def test_a_model_that_draws_takes_seeds_and_names_what_draws() -> None:
    model = Gpt(GptConfig(**SIZES, dropout=0.5))
    context, spec = _context(model), model.spec()
    with torch.device("meta"):
        module = model.build()
    some = replace(context, spec=replace(spec, draws=spec.draws[:1]))
    with pytest.raises(PluginError, match=r"layers\.0\.attn_dropout is a RandomModule that no glob of .*draws names"):
        phases.check_names(module, some)
    with pytest.raises(PluginError, match=r"embed_dropout, .* has no argument `seeds`"):
        phases.check_names(_Deaf(), context)
    with pytest.raises(PluginError, match=r"norm is no RandomModule, so"):
        phases.check_names(module, replace(context, spec=replace(spec, draws=(*spec.draws, "norm"))))


def test_what_dropout_costs() -> None:
    """A mask of a byte per number for each dropout, and nothing at all without."""
    words = ("--model.name", "gpt", "--model.preset", "nano")
    plain, noisy = (costs_of(job_of(*words, "--model.dropout", p)) for p in ("0.0", "0.1"))
    added = dropout_cost(plain.dim)
    assert [op for op in noisy.layer if op == added] == [added] * 2
    assert tuple(op for op in noisy.layer if op != added) == plain.layer
    assert noisy.embeddings == (*plain.embeddings, added) and noisy.head == plain.head
    assert replace(noisy, layer=plain.layer, embeddings=plain.embeddings) == plain
