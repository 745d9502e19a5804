"""Continue a prompt with the model as it stands, on every layout it trains on."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.build import Run
from titan.contracts import Batch

TEMPERATURE = 0.8
NEW_TOKENS = 48


def continuation(run: Run, prompt: str) -> str:
    """The prompt's continuation by `NEW_TOKENS` sampled tokens; all ranks take part and get the same text.

    Every forward has the shape of a training step, padded to the right: attention is causal, so padding changes
    nothing, and a layout that splits the sequence needs its full length.
    """
    ids = run.job.tokenizer.encode(prompt)[-(run.job.data.seq_len - NEW_TOKENS) :]
    begin = len(ids)
    generator = torch.Generator().manual_seed(run.job.run.seed)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(NEW_TOKENS):
            ids.append(_next(run, ids, generator))
    return run.job.tokenizer.decode(ids[begin:])


def _next(run: Run, ids: list[int], generator: torch.Generator) -> int:
    length = run.job.data.seq_len
    row = torch.tensor(ids + [run.job.tokenizer.end] * (length - len(ids)), device=run.rank.device)
    tokens = row.expand(run.job.micro_batch, length).contiguous()
    logits = run.engine.forward(Batch(tokens, tokens))
    chosen = torch.zeros((), dtype=torch.int64, device=run.rank.device)
    if logits is not None:
        scores = _whole(logits)[0, len(ids) - 1, : run.job.tokenizer.vocab_size].float().cpu()
        chosen += torch.multinomial((scores / TEMPERATURE).softmax(-1), 1, generator=generator)[0].to(chosen.device)
    return int(run.world.mesh.sum(chosen, "stage"))


def _whole(logits: Tensor) -> Tensor:
    return logits.full_tensor() if isinstance(logits, DTensor) else logits
