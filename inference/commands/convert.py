"""`titan convert`: convert weights between a titan checkpoint and a Hugging Face folder."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from titan.checkpoint.weights import check_tokenizer, find_weights
from titan.config import load_job
from titan.errors import ConfigError
from titan.inference.load_model import WEIGHTS_HELP, open_job

HELP = "convert weights between a titan checkpoint and a Hugging Face folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the source, the output folder, the format and the dtype."""
    parser.description = f"""{HELP}.

--from may be a Hugging Face folder (config.json and safetensors), a checkpoint, or a run (its newest checkpoint).
Optimizer state is not converted. The tokenizer's files and a folder's other small files are carried over as they are;
what is not is named. Start a run from the result with --checkpoint.init_from, or load it with transformers.
A Hugging Face folder with a tokenizer that no plugin reads needs --tokenizer.name NAME. Memory holds one tensor at a
time."""
    add = parser.add_argument
    add("--from", type=Path, required=True, metavar="DIR", dest="source", help="weights to convert")
    add("--weights", default="", metavar="NAME", help=WEIGHTS_HELP)
    add("--output", type=Path, required=True, metavar="DIR", help="folder to write; it must be absent or empty")
    add("--format", choices=("hf", "dcp"), required=True, help="hf: Hugging Face; dcp: titan's own")
    about = "TOML with [model] and [tokenizer], if --from does not contain them"
    add("--config", type=Path, metavar="FILE", help=about)
    add("--dtype", choices=("float32", "bfloat16"), help="dtype to write; default: as stored")
    about = "largest safetensors file with --format hf; default: 5"
    add("--shard-size", type=float, default=5.0, metavar="GB", help=about)
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

    from titan.inference import conversion

    if args.config is None:
        path, job = open_job(args.source, args.overrides, 1, "--from")
    else:
        path, job = find_weights(args.source, "--from"), load_job(args.config, args.overrides)
        check_tokenizer(path, job.tokenizer, change=job.checkpoint.change_tokenizer)
    weights = conversion.open_weights(path, job.model, args.weights)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    with tqdm(total=len(weights.shapes), unit=" tensors", leave=False, disable=not sys.stderr.isatty()) as bar:
        if args.format == "hf":
            left = conversion.write_hf(
                args.output, weights, job.model, job.tokenizer, dtype, int(args.shard_size * 1e9), bar.update, path
            )
        else:
            left = conversion.write_checkpoint(args.output, weights, job, dtype, bar.update, path)
    files = [file for file in args.output.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    about = {"from": str(path), "to": str(args.output), "format": args.format, "tensors": len(weights.shapes)}
    return about | {"files": len(files), "bytes": size, "not_carried_over": left}
