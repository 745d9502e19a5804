"""Continue prompts with a model, token by token, on every layout it can be trained on.

A token is drawn from softmax(logits / temperature), restricted to the `top_k` most probable tokens and then to the
fewest that hold `top_p` of the remaining probability (nucleus sampling, arXiv 1904.09751). One rank draws on the CPU
and broadcasts the token, so that all ranks agree. Every text has its own generator, seeded by the user's seed, the
prompt and the sample's number, so the rest of the batch does not matter.

Cost: with a KV cache, one forward of the prompt and then one token per forward. Without one (the model's spec names no
attention, or the layout splits layers or sequences over ranks), every token costs a forward of the whole text.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from titan.config import Job
from titan.contracts import Batch, BuildContext, Delimiters, Engine, Tokenizer, option, shard_of
from titan.errors import ConfigError, DivergedError
from titan.inference.cache import Cache, cores_of
from titan.inference.load_model import missing_row
from titan.training.engine import SequentialEngine, evaluating
from titan.training.phases import cut

ROWS = 16
"""Texts that are continued side by side at most; more take turns."""

BROKEN = "\N{REPLACEMENT CHARACTER}"

Stop = Literal["end", "max_new_tokens", "max_seq_len"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw: the options of `titan generate` that all ranks must have alike."""

    max_new_tokens: int = option(
        128, "most tokens to generate; the end of the document or max_seq_len may come first", at_least=1
    )
    temperature: float = option(0.8, "0: always the most probable token; 1: the model's own distribution", at_least=0)
    top_k: int = option(0, "sample from the N most probable tokens; 0: from all tokens", at_least=0)
    top_p: float = option(
        1.0, "nucleus sampling: the fewest tokens whose probabilities sum to X; 1: all tokens", above=0, at_most=1
    )
    samples: int = option(1, "texts per prompt", at_least=1)
    seed: int = option(0, "seed of the sampling; at any layout, up to rounding, it gives the same text")

    def probabilities(self, logits: Tensor) -> Tensor:
        """What tokens are drawn with above temperature 0: logits [..., V] -> float32 [..., V], each row sums to 1."""
        logits = logits.float()
        # The largest becomes 0 first: no temperature, however small, makes an infinity of it.
        scores = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            best = scores.topk(self.top_k)
            scores = torch.full_like(scores, -torch.inf).scatter(-1, best.indices, best.values)
        probabilities = scores.softmax(-1)
        if self.top_p < 1:
            ranked, order = probabilities.sort(descending=True, stable=True)
            ranked[ranked.cumsum(-1) - ranked >= self.top_p] = 0.0
            probabilities = torch.zeros_like(ranked).scatter(-1, order, ranked)
        return probabilities / probabilities.sum(-1, keepdim=True)


@dataclass
class Text:
    """A text that is continued: ids of its prompt, then of what was drawn, without the end id. stopped: by the end id,
    or by which limit; None while it goes on."""

    prompt: tuple[int, ...]
    sample: int
    seed: int
    ids: list[int] = field(init=False)
    stopped: Stop | None = None

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)
        digest = hashlib.sha256(repr((self.seed, self.sample, self.prompt)).encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)

    @property
    def tokens(self) -> list[int]:
        """The generated token ids, without those of the prompt."""
        return self.ids[len(self.prompt) :]

    def draw(self, probabilities: Tensor) -> int:
        """A token, by its probabilities [V] on the CPU."""
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


class Words:
    """The words of tokens that come one at a time: no character is given out before it is whole."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(prompt)
        self._given = len(tokenizer.decode(prompt))

    def add(self, token: int) -> str:
        """What this token makes certain; maybe nothing yet."""
        self._ids.append(token)
        return "" if self._tokenizer.decode(self._ids).endswith(BROKEN) else self.rest()

    def rest(self) -> str:
        """What has not been given out, broken characters too."""
        text = self._tokenizer.decode(self._ids)
        given, self._given = self._given, len(text)
        return text[given:]


def words(tokenizer: Tokenizer, text: Text) -> str:
    """The words that a prompt was continued by."""
    return tokenizer.decode(text.ids)[len(tokenizer.decode(text.prompt)) :]


def encode(job: Job, prompt: str, around: Delimiters) -> tuple[int, ...]:
    """Ids of a prompt and those around it; where there is none, the one from which a document's first id follows.
    ConfigError: it leaves no room for a token, or the tokenizer is not the model's."""
    ids = (*around.before, *job.tokenizer.encode(prompt), *around.after) or (around.start,)
    if len(ids) >= job.spec.max_seq_len:
        longest = f"prompt and generated text together may have max_seq_len = {job.spec.max_seq_len}"
        raise ConfigError(f"the prompt {prompt[:24]!r}... has {len(ids)} tokens; {longest}")
    if why := missing_row(ids, job, "the prompt"):
        raise ConfigError(f"the prompt {prompt[:24]!r}... {why}")
    return ids


Watch = Callable[[int, int], None]
"""Told of each token as it is drawn: (number of the text, token)."""


def generate(
    context: BuildContext,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    watch: Watch | None = None,
    stops: Collection[int] = (),
) -> list[Text]:
    """Continue each prompt `sampling.samples` times; all ranks together, and all get the same texts, prompt by prompt.
    stops: ids of which each ends a text; none: the tokenizer's end.

    ConfigError: a prompt leaves no room for a token.  DivergedError: the model's logits are no finite numbers.
    """
    texts = [Text(tuple(ids), n, sampling.seed) for ids in prompts for n in range(sampling.samples)]
    with evaluating(context.parts):
        for begin in range(0, len(texts), ROWS):
            _continue(_Model(context, engine, stops), texts[begin : begin + ROWS], sampling, begin, watch)
    return texts


def sample(context: BuildContext, engine: Engine, prompt: str, seed: int) -> str:
    """The words that follow the end of a prompt, for a look at a model that has been trained just now."""
    job, drawn = context.job, Sampling(max_new_tokens=48, seed=seed)
    ids = job.tokenizer.encode(prompt) or [job.tokenizer.end]
    [text] = generate(context, engine, [ids[-max(1, job.data.seq_len - drawn.max_new_tokens) :]], drawn)
    return words(job.tokenizer, text)


def _continue(model: "_Model", texts: Sequence[Text], sampling: Sampling, first: int, watch: Watch | None) -> None:
    longest = max(len(text.prompt) for text in texts)
    if longest >= model.longest:
        raise ConfigError(f"a prompt has {longest} tokens; this layout supports at most {model.longest}")
    model.begin(len(texts), longest + sampling.max_new_tokens)
    while any(text.stopped is None for text in texts):
        logits = model.next([text.ids for text in texts])
        tokens = _agree(model.context, _draw(logits, texts, sampling, model.ids), len(texts))
        for number, (text, token) in enumerate(zip(texts, tokens, strict=True), first):
            if text.stopped is not None:
                continue
            if token in model.stops:
                text.stopped = "end"
                continue
            text.ids.append(token)
            if watch is not None:
                watch(number, token)
            if len(text.tokens) == sampling.max_new_tokens:
                text.stopped = "max_new_tokens"
            elif len(text.ids) == model.longest:
                text.stopped = "max_seq_len"


def _draw(logits: Tensor | None, texts: Sequence[Text], sampling: Sampling, ids: int) -> list[int] | None:
    """The next token of each text from logits [B, V]; -1 where they are no finite numbers, None on ranks without.
    ids: of the tokenizer. Rows of a padded table that are no token are never drawn; the most probable one may be."""
    if logits is None:
        return None
    finite = logits.amax(-1).isfinite().tolist()
    if sampling.temperature == 0:
        tokens = logits.argmax(-1).tolist()
    else:
        rows = sampling.probabilities(logits[:, :ids]).cpu()
        tokens = [
            text.draw(row) if good and text.stopped is None else 0
            for text, row, good in zip(texts, rows, finite, strict=True)
        ]
    return [token if good else -1 for token, good in zip(tokens, finite, strict=True)]


def _agree(context: BuildContext, tokens: list[int] | None, count: int) -> list[int]:
    """What the first rank that has drawn has drawn, on all ranks."""
    if context.mesh.layout.world_size > 1:
        speaker = torch.tensor(context.mesh.layout.world_size if tokens is None else context.mesh.rank)
        dist.all_reduce(speaker, dist.ReduceOp.MIN)
        message = torch.tensor(tokens or [0] * count)
        dist.broadcast(message, src=int(speaker))
        tokens = message.tolist()
    assert tokens is not None, "no rank has logits"
    if -1 in tokens:
        raise DivergedError("the model's logits are NaN or infinite")
    return tokens


class _Model:
    """The logits of the token that comes next, for rows of ids that grow."""

    def __init__(self, context: BuildContext, engine: Engine, stops: Collection[int]) -> None:
        self.context, self.engine, self.stops = context, engine, stops or (context.job.tokenizer.end,)
        self.ids = context.job.tokenizer.vocab_size
        # Where ranks hold slices of a sequence, it must come out even.
        self.multiple = context.parts[0].length_multiple
        self.longest = context.spec.max_seq_len // self.multiple * self.multiple
        whole = isinstance(getattr(engine, "inner", engine), SequentialEngine)
        whole = whole and context.mesh.layout.degree_of("sliced") == 1
        cores = cores_of(context.parts[0].module)
        self._caching = whole and bool(context.spec.attention) and not any(core.computes_its_own for core in cores)
        self._cache: Cache | None = None

    def begin(self, rows: int, length: int) -> None:
        """Forget all rows; the coming ones hold at most `length` ids."""
        self._cache = Cache(min(self._rounded(length), self.longest)) if self._caching else None

    def _rounded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple

    def next(self, rows: Sequence[Sequence[int]]) -> Tensor | None:
        """Logits [B, V] that follow the rows' last ids, whole and of the tokenizer's ids alone; None on ranks without.

        The cache knows all but the last id of each row, once it has seen the rows. Where hidden states are split along
        the sequence, a few ids that it knows come along, to make the length even.
        """
        known = self._cache is not None and self._cache.end > 0
        width = self.multiple if known else self._rounded(max(map(len, rows)))
        starts = [max(0, len(row) - width) for row in rows]
        padded = [[*row[start:], *[0] * (width - len(row) + start)] for row, start in zip(rows, starts, strict=True)]
        tokens = torch.tensor(padded, device=self.context.device)
        if self._cache is None:
            batch = cut(Batch(tokens, tokens), self.context)
            logits = self.engine.forward(batch)
        else:
            part = self.context.parts[0]
            batch = Batch(tokens, tokens, positions=self._cache.place(starts, width, tokens.device))
            with self._cache.attached(part.module):
                logits = part.forward(tokens, batch)
        if logits is None:
            return None
        last = tokens.new_tensor([len(row) - 1 for row in rows])
        return self.context.mesh.sum(_whole(logits, batch.positions == last[:, None]), "sliced")


def _whole(logits: Tensor, wanted: Tensor) -> Tensor:
    """[B, S, V], maybe split over V -> [B, V] where `wanted` [B, S] holds, zero in rows where it holds nowhere."""
    at = wanted.long().argmax(1)
    rows = torch.arange(len(at), device=at.device)
    local = torch.where(wanted.any(1)[:, None], shard_of(logits)[rows, at], 0.0)
    if not isinstance(logits, DTensor):
        return local
    size, mesh = torch.Size((len(at), logits.shape[-1])), logits.device_mesh
    placements = [Shard(1) if placement.is_shard() else placement for placement in logits.placements]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=(size[1], 1)).full_tensor()
