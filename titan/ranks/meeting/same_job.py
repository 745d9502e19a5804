"""What the nodes and ranks of a run must have in common, compared before anything is built.

Each states the job as its TOML and command line give it, the plugins that the job uses, and its versions. These may
differ: paths of files that each host opens itself, `data.cache`, `data.workers`, `data.prepare_workers`,
`plugins.path`, and the tables of trackers. What a node would choose from its hardware is not part of it: rank 0
chooses.
"""

import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import titan
from titan.config import Job
from titan.config.sections import declared_tables, table_at
from titan.config.tables import Difference, differences, plain
from titan.contracts import Tracker
from titan.contracts.planner import PACKAGE
from titan.contracts.plugin import registry
from titan.contracts.plugin.options import options_of
from titan.contracts.plugin.registry import Plugin
from titan.errors import ConfigError, ConfigIssue

# Keys that say how a host does its part; and paths that are the run's: its folder, and what rank 0 alone looks for.
OF_HOST = frozenset({("data", "cache"), ("data", "workers"), ("data", "prepare_workers"), ("plugins", "path")})
OF_RUN = frozenset({("run", "dir"), ("checkpoint", "init_from"), ("checkpoint", "resume")})

PACKAGES = ("torch", "torchdata", "numpy", "safetensors", "tokenizers", "transformers", "torchao", "triton")
SOURCES = frozenset({".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".json", ".toml"})
APART = "give each run a port of its own, and its folder the same path on all nodes"
FOLDER = ("run.dir", "run.name")  # keys that make up the run's folder: by other ones, a launcher is another run's


@dataclass(frozen=True)
class Statement:
    """What a node or a rank states. job: nested keys and values, as JSON has them.  plugins: kind and name -> hash of
    the files.  versions: by package."""

    job: Mapping[str, Any] = field(default_factory=dict)
    plugins: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def read(values: Any) -> "Statement":
        """From what JSON gives back; ValueError: it is no statement."""
        names = ("job", "plugins", "versions")
        if isinstance(values, dict) and all(isinstance(values.get(name), dict) for name in names):
            job, plugins, versions = (values[name] for name in names)
            if all(isinstance(text, str) for text in (*plugins.values(), *versions.values())):
                return Statement(job, plugins, versions)
        raise ValueError("no statement of a job")


def statement_of(job: Job, device: str = "", **options: Any) -> Statement:
    """What this process states of a job. device: the type that this rank has found; empty: not chosen yet.
    options: of a command that uses the job."""
    table = plain(job.table)
    for at, config in declared_tables(job.table):
        section = table_at(table, at)
        for option in options_of(config):
            key = (*at, option.key)
            if key in OF_HOST or (option.spec.path and key not in OF_RUN):
                section.pop(option.key, None)
    table["plugins"].pop("path", None)
    for tracker in registry.of_kind(Tracker.kind):
        table["metrics"].pop(tracker.name, None)
    if device:
        table["run"]["device"] = device
    if options:
        table["options"] = plain(options)
    return Statement(table, dict(_plugins_of(job)), versions())


def versions() -> dict[str, str]:
    """The versions that results may depend on."""
    folders = [find_spec(name) for name in ("titan", PACKAGE)]  # the planner lies beside titan in a clone
    source = "-".join(_digest(Path(spec.origin).parent) for spec in folders if spec and spec.origin)
    found = {"Python": platform.python_version(), "titan": f"{titan.__version__} ({source})"}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _plugins_of(job: Job) -> Iterator[tuple[str, str]]:
    validation = () if job.validation_data is None else (job.validation_data,)
    sources = (source.plugin for source in job.sources)
    singles = (job.model, job.tokenizer, job.loss, job.optimizer, job.lr_schedule)
    for plugin in (*singles, *sources, *validation, *job.techniques):
        yield f"{plugin.kind} {plugin.name}", _hash(type(plugin))


def _hash(plugin: type[Plugin]) -> str:
    """Of the files that a plugin's class and those it derives from are in; of a package, of all its files."""
    digests = []
    for base in plugin.__mro__:
        module, package = sys.modules.get(base.__module__), base.__module__.partition(".")[0]
        file = getattr(module, "__file__", None)
        shared = package in sys.stdlib_module_names or package == "torch"
        shared |= package == "titan" and not base.__module__.startswith(f"{registry.BUILT_IN}.")
        if file is not None and not shared:
            digests.append(_digest(Path(file).parent if hasattr(module, "__path__") else Path(file)))
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def _digest(path: Path) -> str:
    """Of a source file, or of those of a folder at any depth, by their places in it; hidden ones do not count."""
    inside = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in SOURCES)
    digest = hashlib.sha256()
    for file in inside:
        place = file.relative_to(path).parts
        if not any(part.startswith((".", "__pycache__")) for part in place):
            digest.update("/".join(place).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def other_run(theirs: Statement, ours: Statement) -> bool:
    """Whether the two are of runs with folders of their own."""
    return any(key in FOLDER for key, *_ in differences(ours.job, theirs.job))


def misfits(theirs: Statement, ours: Statement, they: str, we: str) -> list[str]:
    """Why the two cannot be of one run: a sentence for each key, plugin or version. they, we: "node 3", "rank 0"."""
    options = _by_option(differences(ours.job, theirs.job))
    sentences = [f"{key} = {_shown(value)} on {they}, but {_shown(wanted)} on {we}" for key, wanted, value in options]
    for plugin, wanted in ours.plugins.items():
        if (value := theirs.plugins.get(plugin)) not in (None, wanted):
            sentences.append(f"{plugin}: its files have the hash {value} on {they}, but {wanted} on {we}")
    minors = [statement.versions.get("torch", "").split(".")[:2] for statement in (theirs, ours)]
    if minors[0] != minors[1]:
        sentences.append(f"PyTorch {theirs.versions.get('torch')} on {they}, but {ours.versions.get('torch')} on {we}")
    return sentences


def _by_option(tables: Iterable[Difference]) -> Iterator[Difference]:
    """One difference for each option of a table that one of the two lacks, as that of a technique."""
    for key, before, now in tables:
        if isinstance(before or now, Mapping):
            yield from differences({key: before or {}}, {key: now or {}})
        else:
            yield Difference(key, before, now)


def refusal(sentences: list[str]) -> ConfigError:
    """The error of ranks or nodes that do not fit."""
    *others, last = sentences
    advice = "start all nodes with the same config, options and software"
    return ConfigError([ConfigIssue("", sentence) for sentence in (*others, f"{last}; {advice}")])


def remarks(theirs: Statement, ours: Statement, they: str, we: str) -> list[str]:
    """What differs in versions and may stand: a sentence for each package."""
    sentences = []
    for package in dict.fromkeys((*ours.versions, *theirs.versions)):
        value, wanted = (statement.versions.get(package, "not installed") for statement in (theirs, ours))
        if value != wanted:
            sentences.append(f"{package} is {value} on {they}, but {wanted} on {we}")
    return sentences


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value) if isinstance(value, str) else json.dumps(value)
