"""`titan generate`: continue prompts with a trained model."""

import argparse
import functools
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan import log
from titan.config import Job
from titan.contracts.plugin.options import Option, check_bounds, coerce, options_of
from titan.data.tokens.files import decoded
from titan.errors import ConfigError, ConfigIssue, DataError, by_errno
from titan.inference import generation
from titan.inference.generation import Sampling, Text, Words
from titan.inference.load_model import WEIGHTS_HELP, delimiters, open_job, open_trained
from titan.paths import expanded, refuse_lfs_pointer
from titan.ranks import launcher, process
from titan.ranks.meeting import signals
from titan.ranks.meeting.launch_env import launched_world_size
from titan.ranks.meeting.same_job import statement_of

HELP = "continue prompts with a trained model"
DESCRIPTION = f"""{HELP}: a checkpoint, a run (its newest checkpoint), or a Hugging Face folder.

Prompts are ordinary text: the names of special tokens in them become no special tokens.
The text is printed as it is generated; with --json, or with several prompts or samples, it is printed at the end.
Layout, precision and device are set by --table.key value, independently of how the model was trained.
"""
EXAMPLES = """examples:
  titan generate --checkpoint runs/quickstart --prompt "def read(self, path):" --max-new-tokens 64
  titan generate --checkpoint Llama-3.2-1B --prompt "The capital of France is" --temperature 0 --json
  titan generate --checkpoint runs/mine --prompt-file prompts.txt --samples 4 --top-p 0.9 --run.device cpu
  git log -1 | titan generate --checkpoint runs/mine --prompt - --plugins.bf16.enabled true
  NPROC=2 titan generate --checkpoint runs/mine --prompt "import " --mesh.tp 2

environment: NPROC (ranks to start on this node; default: this process alone). Under torchrun or srun
their ranks are used. Pipeline and context parallelism (--mesh.pp, --mesh.cp) work, but without a KV cache:
each token recomputes the text.
"""
STDIN = "-"

Prompts = Sequence[tuple[str, tuple[int, ...]]]
"""Words and ids of each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the model, the prompts and the sampling."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    about = "model and tokenizer: a checkpoint, a run or a Hugging Face folder"
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help=about)
    add("--weights", default="", metavar="NAME", help=WEIGHTS_HELP)
    prompts = parser.add_mutually_exclusive_group(required=True)
    about = "text to continue; may be repeated; -: read stdin, without its last line end"
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help=about)
    about = "file with one prompt per line (UTF-8); empty lines are skipped; -: stdin"
    prompts.add_argument("--prompt-file", metavar="FILE", help=about)
    for each in options_of(Sampling):
        metavar, about = "N" if each.hint is int else "X", f"{each.spec.doc}; default: {each.default}"
        add(_flag(each), type=each.hint, default=each.default, metavar=metavar, help=about)
    about = "start prompts with the BOS token of a published model, or without"
    default = "default: as its tokenizer states, and --no-bos where titan has trained the weights"
    add("--bos", action=argparse.BooleanOptionalAction, help=f"{about}; {default}")
    about = "one JSON object: text and tokens (ids) of the first result, and results, a list with those of every text"
    add("--json", action="store_true", help=about)
    parser.set_defaults(takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Generate on this process, or on the ranks that the environment asks for."""
    _sampling(args)  # what is wrong is said once, and not on the ranks alone
    place = launcher.place_asked_for()
    world_size = launched_world_size() if place is None else place.world_size
    if STDIN in (args.prompt_file, *(args.prompt or ())) and place is None and world_size > 1:
        raise ConfigError(f"{STDIN}: {world_size} ranks cannot all read stdin; use --prompt-file FILE", "command line")
    path, job = open_job(args.checkpoint, args.overrides, world_size)
    around = delimiters(path, job, args.bos)
    prompts = [(prompt, generation.encode(job, prompt, around)) for prompt in _prompts(args)]
    if place is None:
        return _as_rank(args, prompts, [])
    statement = statement_of(job, **_stated(args, prompts, path))
    return launcher.start(functools.partial(_as_rank, args, prompts), [], place, statement)


def _stated(args: argparse.Namespace, prompts: Prompts, path: Path) -> dict[str, Any]:
    """What all nodes must have beside the job; hosts may have the checkpoint at different paths."""
    digest = hashlib.sha256(json.dumps([ids for _, ids in prompts]).encode()).hexdigest()
    own = {"checkpoint": path.name, "weights": args.weights, "bos": args.bos, "prompts": digest}
    return {**own, **asdict(_sampling(args))}


def _sampling(args: argparse.Namespace) -> Sampling:
    values, faults = {each.key: getattr(args, each.key) for each in options_of(Sampling)}, []
    for each in options_of(Sampling):
        try:
            check_bounds(coerce(values[each.key], each.hint), each.spec)
        except ValueError as error:
            faults.append(ConfigIssue("command line", f"{_flag(each)} {values[each.key]}: {error}"))
    if faults:
        raise ConfigError(faults)
    return Sampling(**values)


def _flag(declared: Option) -> str:
    return f"--{declared.key.replace('_', '-')}"


def _prompts(args: argparse.Namespace) -> Iterator[str]:
    if args.prompt is not None:
        for prompt in args.prompt:
            # A word of the command line has lone surrogates where its bytes are not UTF-8.
            whole = prompt if prompt == STDIN else decoded(os.fsencode(prompt), "--prompt")
            yield re.sub(r"(\r\n|\r|\n)\Z", "", _read(STDIN)) if whole == STDIN else whole
        return
    lines = [line for line in re.split(r"\r\n|\r|\n", _read(args.prompt_file)) if line.strip()]
    if not lines:
        raise DataError(f"--prompt-file {args.prompt_file}: the file holds no prompt")
    yield from lines


def _read(source: str) -> str:
    path = expanded(source, "--prompt-file")
    if source != STDIN:
        refuse_lfs_pointer(path)
    try:
        data = sys.stdin.buffer.read() if source == STDIN else path.read_bytes()
    except OSError as error:
        raise by_errno(error, DataError(f"--prompt-file {source}: cannot be read: {error.strerror}")) from None
    return decoded(data, "stdin" if source == STDIN else source)


def _as_rank(args: argparse.Namespace, prompts: Prompts, _: list[str]) -> int:
    for number in signals.SIGNALS:  # there is nothing to save
        signal.signal(number, signal.SIG_DFL)
    return process.run_as_rank(functools.partial(_generate, args, prompts))


def _generate(args: argparse.Namespace, prompts: Prompts, rank: int) -> None:
    log.set_up(rank)
    path, job = open_job(args.checkpoint, args.overrides, launched_world_size())
    me = process.join(job, **_stated(args, prompts, path))
    trained = open_trained(path, job, me, args.weights, args.bos)
    began, talks = time.perf_counter(), rank == 0
    watch: Callable[[int, int], None] | None = None
    if talks and not args.json and len(prompts) * args.samples == 1:
        [(prompt, ids)] = prompts
        words = Words(job.tokenizer, ids)
        print(prompt, end="", flush=True)

        def watch(_: int, token: int) -> None:
            print(words.add(token), end="", flush=True)

    ids_of_all, stops = [ids for _, ids in prompts], trained.delimiters.stops
    texts = generation.generate(trained.context, trained.engine, ids_of_all, _sampling(args), watch, stops)
    if not talks:
        return
    if watch is not None:
        print(words.rest())
    else:
        _show(texts, job, args, prompts)
    _close(texts, job, time.perf_counter() - began)


def _show(texts: Sequence[Text], job: Job, args: argparse.Namespace, prompts: Prompts) -> None:
    results: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        (prompt, _), words = prompts[number // args.samples], generation.words(job.tokenizer, text)
        about = {"prompt": prompt, "prompt_tokens": len(text.prompt), "stopped": text.stopped}
        results.append({"text": words, "tokens": text.tokens, **about})
        if not args.json:
            place = f"prompt {number // args.samples + 1}, sample {number % args.samples + 1}"
            print(f"--- {place}\n{prompt}{words}")
    if args.json:
        print(json.dumps({**results[0], "results": results}))


def _close(texts: Sequence[Text], job: Job, seconds: float) -> None:
    count = sum(len(text.tokens) for text in texts)
    print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s", file=sys.stderr)
    if full := [len(text.ids) for text in texts if text.stopped == "max_seq_len"]:
        most = job.spec.max_seq_len
        even = f"; this layout splits no more than {max(full)} of them evenly" if max(full) < most else ""
        print(f"stopped at the model's max_seq_len, {most} tokens with the prompt{even}", file=sys.stderr)
