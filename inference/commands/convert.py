"""`titan convert`: convert weights between titan's checkpoints, Hugging Face folders and PyTorch's default format."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.checkpoint.disk.folder import is_dcp
from titan.config import Job, load_job
from titan.errors import ConfigError
from titan.inference.load_model import WEIGHTS_HELP, open_job
from titan.paths import expanded
from titan.weights.load import check_tokenizer, find_weights, refuse_technique

if TYPE_CHECKING:
    from titan.inference.conversion import Weights

HELP = "convert weights to a checkpoint, a Hugging Face folder, or PyTorch's default format"

FORMATS = "titan: a checkpoint; hf: Hugging Face; dcp: PyTorch's default, as torch.distributed.checkpoint writes it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the source, the output folder, the format and the dtype."""
    parser.description = f"""{HELP}.

--from may be a Hugging Face folder (config.json and safetensors), a checkpoint, or a run (its newest checkpoint). It
may be a folder in PyTorch's default format, as torch.distributed.checkpoint.save writes it, with the weights under the
model's names or behind `model.`. It does not say which model that is: name the job with --config. PyTorch executes the
pickle in such a folder, so it needs --trust-pickle, to be given only where you trust whoever wrote the folder.

Optimizer state is not converted. The tokenizer's files and a folder's other small files are carried over as they are;
what is not is named. Start a run from the result with --checkpoint.init_from, or load it with transformers.
A Hugging Face folder with a tokenizer that no plugin reads needs --tokenizer.name NAME. Memory holds one tensor at a
time."""
    add = parser.add_argument
    add("--from", type=Path, required=True, metavar="DIR", dest="source", help="weights to convert")
    add("--weights", default="", metavar="NAME", help=WEIGHTS_HELP)
    add("--output", type=Path, required=True, metavar="DIR", help="folder to write; it must be absent or empty")
    add("--format", choices=("titan", "hf", "dcp"), required=True, help=FORMATS)
    about = "TOML with [model] and [tokenizer], if --from does not contain them"
    add("--config", type=Path, metavar="FILE", help=about)
    add("--dtype", choices=("float32", "bfloat16"), help="dtype to write; default: as stored")
    about = "largest safetensors file with --format hf; default: 5"
    add("--shard-size", type=float, default=5.0, metavar="GB", help=about)
    add("--trust-pickle", action="store_true", help="read a folder in PyTorch's default format, which can execute code")
    add("--json", action="store_true", help="one JSON object")
    parser.set_defaults(takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Convert the weights and print what was written; the exit code."""
    if not args.shard_size > 0:
        raise ConfigError(f"--shard-size {args.shard_size:g}: must be above 0", "command line")
    report = _convert(args)
    if args.json:
        print(json.dumps(report))
    else:
        size = report["bytes"] / 1e9
        print(f"{report['tensors']} tensors, {size:,.2f} GB in {report['files']} files: {report['to']}")
        if report["not_carried_over"]:
            print(f"not carried over: {', '.join(report['not_carried_over'])}")
    return 0


def _convert(args: argparse.Namespace) -> dict[str, Any]:
    # Imported here: `titan --help` has no use for torch.distributed.checkpoint.
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    from titan.inference import conversion, hf_export

    path, job, weights = _opened(args)
    beside = None if is_dcp(path) else path
    dtype = getattr(torch, args.dtype) if args.dtype else None
    with tqdm(total=len(weights.shapes), unit=" tensors", leave=False, disable=not sys.stderr.isatty()) as bar:
        if args.format == "hf":
            left = hf_export.write_hf(
                args.output, weights, job.model, job.tokenizer, dtype, int(args.shard_size * 1e9), bar.update, beside
            )
        elif args.format == "titan":
            left = conversion.write_checkpoint(args.output, weights, job, dtype, bar.update, beside)
        else:
            left = conversion.write_dcp(args.output, weights, dtype, bar.update, beside)
    files = [file for file in args.output.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    about = {"from": str(path), "to": str(args.output), "format": args.format, "tensors": len(weights.shapes)}
    return about | {"files": len(files), "bytes": size, "not_carried_over": left}


def _opened(args: argparse.Namespace) -> tuple[Path, Job, Weights]:
    """The folder of the weights, their job, and the weights held against its model."""
    from titan.inference import conversion

    path = expanded(args.source, "--from")
    if is_dcp(path):
        return path, *_opened_dcp(path, args)
    if args.config is None:
        path, job = open_job(args.source, args.overrides, 1, "--from")
    else:
        path, job = find_weights(args.source, "--from"), load_job(args.config, args.overrides)
        check_tokenizer(path, job.tokenizer, change=job.checkpoint.change_tokenizer)
    return path, job, conversion.open_weights(path, job.model, args.weights)


def _opened_dcp(path: Path, args: argparse.Namespace) -> tuple[Job, Weights]:
    what = f"--from {path} is in PyTorch's default checkpoint format"
    if not args.trust_pickle:
        risk = "reading its .metadata can execute code; add --trust-pickle if you trust whoever wrote it"
        raise ConfigError(f"{what}: {risk}")
    if args.config is None:
        raise ConfigError(f"{what}, which does not say of which model: name its job with --config")
    from titan.inference.dcp import DcpWeights

    refuse_technique(path, args.weights)
    job = load_job(args.config, args.overrides)
    return job, DcpWeights(path, job.model)
