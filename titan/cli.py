"""`titan COMMAND ...`: a command is a module of `titan.commands`, or one that an entry point of that name brings.

`titan.launch` is `titan train`.
"""

import argparse
import difflib
import importlib
import importlib.metadata
import itertools
import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import titan.commands
from titan import __version__
from titan.errors import EXIT_FAILED, EXIT_WRONG_INPUT, ConfigError, PluginError, TitanError, by_errno
from titan.packages import check_torch, untried_torch
from titan.paths import expanded, told
from titan.terminal import TRACEBACK_FLAG, let_go, report, say, stand_in_for_closed, take_traceback_flag, warn

ENTRY_POINTS = "titan.commands"
OVERRIDE = re.compile(r"--[^\s.=]+(\.[^\s.=]+)+(=|$)")
"""`--table.key`, alone or with `=value`."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage. Flags are to be written out."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: error: {message}; see {self.prog} --help")
        sys.exit(EXIT_WRONG_INPUT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code.

    A command module has `HELP`, `add_arguments(parser)` and `run(args) -> int`. One that takes `--table.key value`
    overrides says `parser.set_defaults(takes_overrides=True)` and finds them in `args.overrides`.
    """
    stand_in_for_closed()
    words = take_traceback_flag(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="titan", description="A PyTorch-native trainer for large language models.")
    parser.add_argument("--version", action="version", version=f"titan {__version__}")
    parser.add_argument(TRACEBACK_FLAG, action="store_true", help="show stack traces of errors")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    own, overrides = _without_overrides(words)
    asked = next((word for word in own if not word.startswith("-")), "")
    try:
        if "--version" not in words:
            check_torch()
        commands = _commands(asked)
    except TitanError as error:
        report(error)
        return error.exit_code
    if asked and asked not in commands:
        from titan.contracts.plugin.options import did_you_mean

        parser.error(f"unknown command {asked!r}{did_you_mean(asked, commands)}")
    for name, module in commands.items():
        raw, about = argparse.RawDescriptionHelpFormatter, module.HELP
        module.add_arguments(subparsers.add_parser(name, help=about, description=about, formatter_class=raw))
    try:
        of_command = subparsers.choices.get(asked, parser)
        known = {*_flags(of_command), TRACEBACK_FLAG}
        for word in itertools.takewhile(lambda word: word != "--", own):  # before argparse says that a flag is missing
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in known and " " not in flag:  # with a space it is text to argparse
                _refuse(word, of_command)
        args, rest = parser.parse_known_args(own)
        args.overrides = overrides
        for name, value in vars(args).items():
            if isinstance(value, Path):
                setattr(args, name, expanded(value, f"--{name.replace('_', '-')}"))
        if unknown := rest if hasattr(args, "takes_overrides") else [*rest, *overrides]:
            _refuse(unknown[0], of_command)
        if args.command != "train" and os.environ.get("RANK", "0") == "0" and (remark := untried_torch()):
            say(f"warning: {remark}")  # a run's log says it
        code: int = commands[args.command].run(args)
        sys.stdout.flush()
        return code
    except TitanError as error:
        report(error)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left, as `| head` does
        return EXIT_FAILED
    except OSError as error:
        let_go(sys.stdout)  # or what is left in its buffer would be tried again at the end
        wrong = by_errno(error, ConfigError(told(error, "the output")))
        report(wrong)
        return wrong.exit_code


def _without_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command without `--table.key value`, and these: argparse would take a value for a position."""
    own, overrides, awaited = list[str](), list[str](), False
    for word in words:
        key = OVERRIDE.match(word)
        (overrides if key or (awaited and not word.startswith("--")) else own).append(word)
        awaited = key is not None and "=" not in word
    return own, overrides


def _refuse(word: str, parser: argparse.ArgumentParser) -> NoReturn:
    overridable = parser.get_default("takes_overrides")
    what = "expected --table.key value" if overridable else f"{parser.prog} takes no such argument"
    flag = word.partition("=")[0]
    flags = difflib.get_close_matches(flag, [known for known in _flags(parser) if known != flag], n=1)
    near = (overridable and _keys(word)) or flags
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise ConfigError(f"{word}: {what}{hint}", "command line")


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The flags of a command and of the actions below it."""
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _flags(below)


def _keys(word: str) -> list[str]:
    """What a word may mean for a job: a file, or three keys at most, such as `--train.steps` for `--steps`."""
    from titan.config.load import load_job
    from titan.config.sections import declared_tables
    from titan.config.tables import BUILT_IN
    from titan.contracts.plugin.options import options_of

    if not word.startswith("-") and (word.endswith(".toml") or (BUILT_IN / f"{word}.toml").is_file()):
        return [f"--config {word}"]
    words = [part for part in re.split(r"[-_.]", word.partition("=")[0]) if part]
    tables = declared_tables(load_job(None).table)
    every = [".".join(map(str, (*path, each.key))) for path, config in tables for each in options_of(config)]
    keys = [key for key in every if re.split(r"[_.]", key)[-len(words) :] == words]
    return [f"--{key}" for key in sorted(keys, key=len)[:3]]


def _commands(asked: str) -> dict[str, ModuleType]:
    """The module of the command asked for; those of all commands where it is none. A module may import for seconds.
    PluginError: the command asked for is an entry point's and cannot be imported; another such one is left out."""
    own = {module.name: f"titan.commands.{module.name}" for module in pkgutil.iter_modules(titan.commands.__path__)}
    own["train"] = "titan.launch"
    if asked in own:
        return {asked: importlib.import_module(own[asked])}
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    modules: dict[str, ModuleType] = {}
    for name in [asked] if asked in entries else sorted({*own, *entries}):
        try:
            modules[name] = importlib.import_module(own[name]) if name in own else entries[name].load()
        except ImportError as error:
            what = f"command {name} (entry point {entries[name].value}) cannot be imported: {error}"
            if name == asked:
                raise PluginError(f"{what}; install its package again") from error
            warn(what, error)
    return modules


if __name__ == "__main__":
    sys.exit(main())
