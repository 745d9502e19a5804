"""Closed-form estimates for a model, beside its exact counts: `titan plan --formulas`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan.config import Job, load_table
from titan.config.tables import Table, override
from titan.contracts.base.cost import PersistentState
from titan.contracts.base.spec import ModelSpec, nearest
from titan.errors import ConfigError, ConfigIssue
from titan.planner.step.arithmetic import (
    RECIPES,
    Activations,
    activations,
    float32_activations,
    hardware_flops_per_token,
    optimal_tokens,
    parts,
    textbook_parameters,
    training_seconds,
    zero_bytes,
)

# --- the report ---------------------------------------------------------------------------------------------------


def alone(overrides: Sequence[str]) -> Job:
    """A job of the model alone: one device, batch size 1, sequences of the model's full length; overrides win.

    overrides: `--key=value` words.

    Raises:
        ConfigError: the job is invalid; lists all errors.
    """

    given = Table()
    override(given, overrides)
    model: dict[str, Any] = {key: given.values[key] for key in ("model", "plugins") if key in given.values}
    if isinstance(model.get("plugins"), dict):
        model["plugins"] = {key: value for key, value in model["plugins"].items() if key == "path"}

    def load(seq_len: int, table: Mapping[str, Any], words: Sequence[str]) -> Job:
        small = {"train": {"steps": 1, "global_batch_size": 1}, "data": {"seq_len": seq_len}}
        return load_table({**small, **table}, "command line", words)

    # A first job without the layout, which may not take this length, says how long the model's sequences are.
    return load(load(2, model, ()).spec.max_seq_len, {}, overrides)


def report(
    job: Job,
    *,
    tokens: float | None = None,
    devices: int | None = None,
    peak_tflops: float | None = None,
    utilisation: float = 0.45,
    held: Iterable[PersistentState] = (),
) -> dict[str, Any]:
    """Every formula for the model of a job, as a JSON object in bytes, FLOPs and seconds.

    FLOPs, time and compute-optimal tokens count the parameters that a token passes, memory counts all.

    tokens: training tokens; None: the compute-optimal number.  devices: None: as many as the job's layout has.
    peak_tflops: peak of a device in TFLOP/s; None: no training times.  utilisation: fraction of the peak, with
    recomputation counted where it is done.  held: the job's own model state per parameter, before sharding.

    Raises:
        ConfigError: devices is not a multiple of the model-parallel ranks, or a number is not above 0.
    """
    given = {"tokens": tokens, "devices": devices, "peak-tflops": peak_tflops, "utilisation": utilisation}
    faults = [
        ConfigIssue("command line", f"--{key} {number:g}: must be above 0")
        for key, number in given.items()
        if number is not None and not number > 0
    ]
    if faults:
        raise ConfigError(faults)
    spec, seq_len = job.spec, job.data.seq_len
    tokens = optimal_tokens(spec.active_params) if tokens is None else tokens
    devices = job.layout.world_size if devices is None else devices
    shards, ranks = _ranks(job, devices)
    return {
        "model": {
            "layers": spec.n_layers,
            "dim": spec.dim,
            "heads": spec.n_heads,
            "kv_heads": spec.n_kv_heads,
            "ffn_dim": spec.ffn_dim,
            "vocab_size": spec.vocab_size,
            "seq_len": seq_len,
            "tied": bool(spec.tied),
        },
        "parameters": {
            "exact": spec.params,
            "active": spec.active_params,
            "parts": parts(spec),
            "textbook": textbook_parameters(spec.n_layers, spec.dim, spec.vocab_size),
        },
        "state": _state(spec, shards, ranks, held),
        "activations": _activations(spec, seq_len, job.layout.degree_of("slices")),
        "flops_per_token": {
            "exact": spec.flops_per_token(seq_len),
            "exact_full_recompute": hardware_flops_per_token(spec, seq_len),
            "6P": 6 * spec.active_params,
            "8P": 8 * spec.active_params,
        },
        "training": _training(spec, seq_len, tokens, devices, peak_tflops, utilisation),
    }


def _ranks(job: Job, devices: int) -> tuple[int, int]:
    """Ranks that split the model, and how many such groups may share its state: those of a worker."""
    shards, workers = job.layout.degree_of("slices", "layers"), job.layout.workers
    if devices % (shards * workers):
        near = nearest(devices, step=shards * workers)
        of = f"{shards} model-parallel ranks" + (f" x {workers} workers" if workers > 1 else "")
        raise ConfigError(f"--devices {devices}: must be a multiple of the {of}; nearest: {near}", "command line")
    return shards, devices // (shards * workers)


def _state(spec: ModelSpec, shards: int, ranks: int, held: Iterable[PersistentState]) -> dict[str, Any]:
    own: dict[str, float] = {}
    for part in held:
        if not part.gathered_units:
            own[part.component] = own.get(part.component, 0) + part.bytes_per_param
    return {
        "model_split_over": shards,
        "data_parallel_ranks": ranks,
        "whole_model": {name: sum(recipe) * spec.params for name, recipe in RECIPES.items()},
        "zero": {name: list(zero_bytes(spec.params / shards, ranks, recipe)) for name, recipe in RECIPES.items()},
        "own_bytes_per_parameter": own,
        "float32_weights": 4 * spec.params,
    }


def _activations(spec: ModelSpec, seq_len: int, tensor: int) -> dict[str, Any]:
    ways = {"one device": (1, False)}
    if tensor > 1:
        ways |= {f"tensor {tensor}": (tensor, False), f"tensor and sequence {tensor}": (tensor, True)}
    sizes = (seq_len, spec.dim, spec.n_heads)
    kept = {name: activations(*sizes, tensor=t, sequence=sequence) for name, (t, sequence) in ways.items()}
    return {
        "per_layer": {name: each._asdict() for name, each in kept.items()},
        "all_layers": {name: Activations(*(spec.n_layers * n for n in each))._asdict() for name, each in kept.items()},
        "all_layers_float32": spec.n_layers * float32_activations(*sizes),
    }


def _training(
    spec: ModelSpec, seq_len: int, tokens: float, devices: int, peak_tflops: float | None, utilisation: float
) -> dict[str, Any]:
    about: dict[str, Any] = {
        "tokens": tokens,
        "tokens_per_parameter": tokens / spec.active_params,
        "compute_optimal_tokens": optimal_tokens(spec.active_params),
        "model_flops": tokens * spec.flops_per_token(seq_len),
        "devices": devices,
        "peak_tflops": peak_tflops,
        "utilisation": utilisation,
        "seconds": None,
    }
    if peak_tflops is not None:
        peak = peak_tflops * 1e12
        speed, active = devices * peak * utilisation, spec.active_params
        about["seconds"] = {
            "6TP": training_seconds(active, tokens, devices, peak, utilisation),
            "8TP": training_seconds(active, tokens, devices, peak, utilisation, recompute=True),
            "exact": tokens * spec.flops_per_token(seq_len) / speed,
            "exact_full_recompute": tokens * hardware_flops_per_token(spec, seq_len) / speed,
        }
    return about


# --- as a table ---------------------------------------------------------------------------------------------------


def text(report: Mapping[str, Any]) -> str:
    """The text tables of a report (see `report`): parameters, state, activations, FLOPs, training time."""
    return "\n".join(
        line
        for section in (_parameter_lines, _state_lines, _activation_lines, _work_lines, _time_lines)
        for line in (*section(report), "")
    ).rstrip()


def _row(name: str, *cells: str, width: int = 14) -> str:
    return f"  {name:<36}" + "".join(f"{cell:>{width}}" for cell in cells)


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e9:.3g} GB"


def _parameter_lines(report: Mapping[str, Any]) -> list[str]:
    model, counted = report["model"], report["parameters"]
    exact, active, textbook = (counted[key] for key in ("exact", "active", "textbook"))
    sizes = ", ".join(f"{key} {model[key]}" for key in ("layers", "dim", "heads", "kv_heads", "ffn_dim", "vocab_size"))
    return [
        f"Parameters ({sizes})",
        *(_row(name, f"{number:,}", width=22) for name, number in counted["parts"].items() if number),
        _row("total", f"{exact:,}", width=22),
        *([_row("active per token", f"{active:,}", width=22) + f"  {active / exact:.1%}"] if active < exact else []),
        _row("12 l h^2 + 2 v h", f"{textbook:,}", width=22) + f"  {textbook / exact - 1:+.2%}",
    ]


def _state_lines(report: Mapping[str, Any]) -> list[str]:
    state = report["state"]
    lines = [
        f"Model state with Adam: memory per rank with {state['data_parallel_ranks']} data-parallel ranks, "
        f"model split over {state['model_split_over']} model-parallel ranks",
        _row("bytes per parameter", "whole model", *(f"ZeRO {stage}" for stage in range(4))),
    ]
    for name, stages in state["zero"].items():
        weights, gradients, optimizer = RECIPES[name]
        title = f"{name} = {weights} + {gradients} + {optimizer}"
        lines.append(_row(title, _gb(state["whole_model"][name]), *map(_gb, stages)))
    lines.append(_row("weights only, float32", _gb(state["float32_weights"])))
    own = state["own_bytes_per_parameter"]
    if own:
        words = ", ".join(f"{component} {size:g}" for component, size in own.items())
        lines.append(_row("this job, before sharding", f"{sum(own.values()):g} bytes") + f"  ({words})")
    return lines


def _activation_lines(report: Mapping[str, Any]) -> list[str]:
    kept = report["activations"]
    lines = [
        f"Activation memory per rank, all layers, one sequence of {report['model']['seq_len']:,} tokens",
        _row("recomputation", *Activations._fields),
        *(_row(name, *map(_gb, each.values())) for name, each in kept["all_layers"].items()),
        _row("float32, 4 s (14 h + 2 a s) l", _gb(kept["all_layers_float32"])),
    ]
    model = report["model"]
    if model["ffn_dim"] != 4 * model["dim"] or model["kv_heads"] != model["heads"]:
        lines.append("  (formulas for a GPT: ffn_dim = 4 h, kv_heads = heads, dropout)")
    return lines


def _work_lines(report: Mapping[str, Any]) -> list[str]:
    flops, per_token = report["flops_per_token"], {"exact": "6P", "exact_full_recompute": "8P"}
    return ["FLOPs per token", _row("", "exact", "6 P, 8 P")] + [
        _row(name, f"{flops[exact]:.4g}", f"{flops[rule]:.4g}") + f"  {flops[rule] / flops[exact] - 1:+.1%}"
        for name, (exact, rule) in zip(
            ("forward and backward (6 P)", "with full recomputation (8 P)"), per_token.items(), strict=True
        )
    ]


def _time_lines(report: Mapping[str, Any]) -> list[str]:
    training, days = report["training"], 86400
    lines = [
        f"Training on {training['tokens']:.4g} tokens, {training['tokens_per_parameter']:.3g} per parameter",
        _row("compute-optimal tokens (20 P)", f"{training['compute_optimal_tokens']:.4g}"),
        _row("model FLOPs", f"{training['model_flops']:.4g}"),
    ]
    if training["seconds"] is None:
        return lines
    seconds = training["seconds"]
    hours = {name: took * training["devices"] / 3600 for name, took in seconds.items()}
    devices = f"{training['devices']:,} devices of {training['peak_tflops']:g} TFLOP/s"
    lines.append(f"  time on {devices} at {training['utilisation']:.1%} utilization")
    named = {"6TP": "6 T P / N F U", "8TP": "8 T P / N F U, full recomputation"}
    named |= {"exact": "exact FLOPs", "exact_full_recompute": "exact FLOPs, full recomputation"}
    return lines + [
        _row(title, f"{seconds[name] / days:,.1f} days") + f"  {math.ceil(hours[name]):,} device hours"
        for name, title in named.items()
    ]
