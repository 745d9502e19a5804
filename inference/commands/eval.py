"""`titan eval`: loss, perplexity and bits per byte of a trained model on text."""

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from titan import log
from titan.config import Job
from titan.errors import ConfigError
from titan.inference.evaluation import Reading, evaluate, last_words
from titan.inference.load_model import WEIGHTS_HELP, is_trained, open_job, open_trained
from titan.ranks import launcher, process, watchdog
from titan.ranks.meeting.launch_env import launched_world_size
from titan.ranks.meeting.same_job import statement_of
from titan.terminal import print_report

HELP = "measure the loss, perplexity and bits per byte of a trained model on text"
MOST_BY_DEFAULT = 2048
"""Default context length in tokens of a Hugging Face model that supports more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, which data, and how they are read."""
    parser.description = f"""{HELP}, or its accuracy on last words.

  titan eval --checkpoint runs/quickstart --data stdlib --data.split validation
  titan eval --checkpoint runs/mine --data text --path book.txt --path more/ --json
  titan eval --checkpoint gpt2/ --data jsonl --path lambada.jsonl --last-word
  NPROC=4 titan eval --checkpoint runs/big --data text --path book.txt --mesh.tp 4 --plugins.bf16.enabled true

Options of the dataset are given as --data.KEY VALUE (titan plugins NAME lists them). Results do not depend on layout
or batch size, up to rounding. Metrics follow the Language Model Evaluation Harness (lm-eval):

  loss             nats per predicted token; perplexity is exp(loss)
  word_perplexity  exp(nats per word); words are counted as in lm-eval, by re.split(r"\\s+", text)
  bits_per_byte    bits per byte of UTF-8 text (like word_perplexity, not available for token shards)

Each document is scored on its own. All its tokens are predicted; with --first-token skip the first token is not
scored, as in transformers. The end-of-text id itself is not scored. The first token is predicted from the BOS token of
a published model, as in lm-eval; where it has none, or titan has trained the weights, from the end-of-text id. Tokens
that a published tokenizer adds to a text count as its own: where BOS is one, lm-eval and titan predict it from BOS, and
--first-token skip does not.
A document longer than --seq-len is read in windows of --seq-len tokens whose ends lie --stride tokens apart. Each
window scores only the tokens that earlier windows have not.

--last-word scores only the last word of each document, as LAMBADA does. accuracy is the share of documents in which
every token of that word is the most probable one; word_perplexity is LAMBADA's perplexity."""
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="a run, a checkpoint or a Hugging Face folder")
    add("--weights", default="", metavar="NAME", help=WEIGHTS_HELP)
    add("--data", required=True, metavar="NAME", help="dataset: text, jsonl, shards, ...")
    add("--path", action="append", metavar="P", help="files of the dataset; may be repeated")
    add("--last-word", action="store_true", help="score only the last word of each document")
    about = "context length in tokens; default: the run's seq_len, or for a published model its maximum, at most"
    add("--seq-len", type=int, metavar="N", help=f"{about} {MOST_BY_DEFAULT}")
    add("--stride", type=int, metavar="N", help="tokens between the ends of two windows; default: --seq-len")
    about = "whether to score the first token of a document; default: predict"
    add("--first-token", choices=("predict", "skip"), default="predict", help=about)
    about = "predict the first token from the BOS token of a published model, or from the end-of-text id"
    default = "default: --bos, unless titan has trained the weights"
    add("--bos", action=argparse.BooleanOptionalAction, help=f"{about}; {default}")
    add("--batch-size", type=int, default=8, metavar="N", help="windows per forward pass; default: 8")
    add("--limit", type=int, metavar="N", help="use only the first N documents")
    add("--json", action="store_true", help="one JSON object")
    parser.set_defaults(takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Measure on one process, or on the ranks that NPROC asks for."""
    for option in ("seq_len", "stride", "batch_size", "limit"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} {value}: must be at least 1", "command line")
    place = launcher.place_asked_for()
    if place is None:
        return _as_rank(args, [])
    path, job = _open(args, place.world_size)  # what is wrong is said once, before there are ranks
    job.sources[0].plugin.files()
    return launcher.start(functools.partial(_as_rank, args), [], place, statement_of(job, **_stated(args, path)))


def _stated(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """What all nodes must have beside the job; hosts may have the checkpoint at different paths."""
    keys = ("weights", "bos", "last_word", "stride", "first_token", "batch_size", "limit")
    return {"checkpoint": path.name} | {key: getattr(args, key) for key in keys}


def _open(args: argparse.Namespace, world_size: int) -> tuple[Path, Job]:
    """Where the weights lie, and the job: the model's, with the data of the command line."""
    words = ["--data.name", args.data]
    if args.path:
        words += ["--data.path", args.path[0] if len(args.path) == 1 else json.dumps(args.path)]
    if args.seq_len:
        words += ["--data.seq_len", str(args.seq_len)]
    words += args.overrides
    path, job = open_job(args.checkpoint, words, world_size)
    if not is_trained(path) and not any(word.startswith("--data.seq_len") for word in words):
        words += ["--data.seq_len", str(min(job.spec.max_seq_len, MOST_BY_DEFAULT))]
        path, job = open_job(args.checkpoint, words, world_size)
    return path, job


def _as_rank(args: argparse.Namespace, _: list[str]) -> int:
    watchdog.answer_to_quit()
    return process.run_as_rank(functools.partial(_evaluate, args))


def _evaluate(args: argparse.Namespace, rank: int) -> None:
    path, job = _open(args, launched_world_size())
    me = process.join(job, **_stated(args, path))
    log.set_up(rank)
    trained = open_trained(path, job, me, args.weights, args.bos)
    reading = Reading(
        stride=args.stride or 0, first_token=args.first_token, batch_size=args.batch_size, limit=args.limit or 0
    )
    hidden = rank > 0 or not sys.stderr.isatty()
    with tqdm(unit=" tokens", unit_scale=True, desc="predicted", leave=False, disable=hidden) as bar:
        report = (last_words if args.last_word else evaluate)(trained, reading, bar.update)
    if rank == 0:
        more = {"seq_len": job.data.seq_len, "checkpoint": str(path), "data": args.data}
        print_report({**report, **more}, as_json=args.json)
