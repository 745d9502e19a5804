"""`titan data`: tokenize ahead of a run, train a tokenizer, inspect a token shard."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan.config import load_job
from titan.contracts import Dataset
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import Where, parse
from titan.data.open import preparing
from titan.data.tokens.bytepairs import train_ranks, write_ranks
from titan.data.tokens.prepare import loss_in, prepare
from titan.data.tokens.shards import open_shard
from titan.data.tokens.tokenize import Lost
from titan.errors import ConfigError, DataError, by_errno
from titan.terminal import print_report

HELP = "tokenize a job's text ahead of its run, train a tokenizer, inspect a token shard"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One parser for each of the three."""
    kinds = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    about = "tokenize a job's text into data.cache"
    ahead = kinds.add_parser("prepare", help=about, description=about)
    ahead.add_argument("--config", type=Path, metavar="FILE", help="TOML of the job; default: configs/quickstart.toml")
    ahead.add_argument("--json", action="store_true", help="one JSON object")
    ahead.set_defaults(takes_overrides=True, does=_prepare)

    about = "train a byte-pair tokenizer on text and write its rank file"
    train = kinds.add_parser("train-tokenizer", help=about, description=about)
    source = train.add_mutually_exclusive_group()
    about = "dataset to train on; default: the default dataset (titan plugins)"
    source.add_argument("--data", metavar="NAME", help=about)
    source.add_argument("--config", type=Path, metavar="FILE", help="train on the datasets of a job instead")
    train.add_argument("--path", action="append", metavar="P", help="files of the dataset; may be repeated")
    about = "vocabulary size, with the 256 bytes; default: 4096"
    train.add_argument("--size", type=int, default=4096, metavar="N", help=about)
    train.add_argument("--output", type=Path, required=True, metavar="FILE", help="rank file to write")
    train.add_argument("--json", action="store_true", help="one JSON object")
    train.set_defaults(takes_overrides=True, does=_train_tokenizer)

    about = "show a token shard and verify its content"
    inspect = kinds.add_parser("inspect", help=about, description=about)
    inspect.add_argument("file", type=Path, help="a token shard")
    inspect.add_argument("--json", action="store_true", help="one JSON object")
    inspect.set_defaults(does=_inspect)


def run(args: argparse.Namespace) -> int:
    """Run the action and print its report."""
    print_report(args.does(args), as_json=args.json)
    return 0


def _prepare(args: argparse.Namespace) -> dict[str, Any]:
    job = load_job(args.config, args.overrides)
    made, lost = [], Lost()
    for dataset in (source.plugin for source in job.sources):
        shards = prepare(dataset, job.tokenizer, progress=True, **preparing(job))
        made += shards
        if dataset.shards() is None:
            lost.add(loss_in(shards[0].path.parent))
    return {
        "tokens": sum(shard.tokens for shard in made),
        "documents": sum(shard.documents for shard in made),
        "sampled_bytes": lost.sampled,
        "lost": round(lost.share, 6),
        "files": [str(shard.path) for shard in made],
    }


def _train_tokenizer(args: argparse.Namespace) -> dict[str, Any]:
    if args.size < 257:
        raise ConfigError(f"--size {args.size}: must be at least 257: the 256 bytes and one merge", "command line")
    if args.config is not None:
        sources = [source.plugin for source in load_job(args.config, args.overrides).sources]
    elif args.overrides:
        raise ConfigError(f"{args.overrides[0]}: overrides need --config", "command line")
    else:
        sources = [_dataset(args.data, args.path)]
    ranks = train_ranks(_texts(sources), args.size)
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_ranks(args.output, ranks)
    except OSError as error:
        raise by_errno(error, DataError(f"{args.output} cannot be written: {error.strerror}")) from None
    return {"ranks": len(ranks), "file": str(args.output)}


def _texts(sources: list[Dataset]) -> Iterator[str]:
    for source in sources:
        for file in source.files():
            for document in source.documents(file):
                yield document.text
        print(f"read {source.name}", file=sys.stderr)


def _dataset(name: str | None, path: list[str] | None) -> Dataset:
    """The dataset of that name on these files (None: the default one)."""
    registry.load_plugins()
    plugin = registry.chosen(Dataset.kind, name)
    if plugin is None or registry.trouble(Dataset.kind, plugin.name):
        raise ConfigError(f"--data {name}: {registry.trouble(Dataset.kind, str(name))}", "command line")
    config, issues = parse(plugin.Config, {} if path is None else {"path": path}, Where("data", "command line"))
    if issues:
        raise ConfigError(issues)
    dataset = plugin(config)
    assert isinstance(dataset, Dataset)
    if dataset.shards() is not None:
        what = f"--data {plugin.name}: this dataset holds tokens; a tokenizer is trained on text"
        raise ConfigError(what, "command line")
    return dataset


def _inspect(args: argparse.Namespace) -> dict[str, Any]:
    shard = open_shard(args.file)
    shard.verify()
    tokens, ends = shard.map()
    return {
        "file": str(shard.path),
        "tokens": shard.tokens,
        "documents": shard.documents,
        "bytes_per_token": shard.width,
        "largest_id": int(tokens.max(initial=0)),
        "first_document": [int(number) for number in tokens[: int(ends[0]) if shard.documents else 0][:32]],
        "sha256": shard.digest,
    }
