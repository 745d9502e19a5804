"""`titan COMMAND ...`: one module of `titan.commands` a command; `titan.launch` is `titan train`."""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

import titan.commands
from titan import __version__, launch
from titan.errors import (
    EXIT_FAILED,
    TRACEBACK_FLAG,
    ConfigError,
    Fault,
    TitanError,
    report,
    take_traceback_flag,
)
from titan.ranks.launcher import let_threads_sleep


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code.

    A command module has `HELP`, `add_arguments(parser)` and `run(args) -> int`. One that takes `--table.key value`
    overrides says `parser.set_defaults(takes_overrides=True)` and finds them in `args.overrides`.
    """
    words = take_traceback_flag(sys.argv[1:] if argv is None else argv)
    let_threads_sleep()
    parser = argparse.ArgumentParser(prog="titan", description="A PyTorch-native trainer for large language models.")
    parser.add_argument("--version", action="version", version=f"titan {__version__}")
    parser.add_argument(TRACEBACK_FLAG, action="store_true", help="show stack traces of errors")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands = _commands()
    for name, module in commands.items():
        own = subparsers.add_parser(
            name, help=module.HELP, description=module.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(own)
    args, rest = parser.parse_known_args(words)
    args.overrides = rest
    try:
        if rest and not getattr(args, "takes_overrides", False):
            raise ConfigError([Fault("command line", f"{rest[0]}: titan {args.command} takes no such argument")])
        code: int = commands[args.command].run(args)
        return code
    except TitanError as error:
        report(error)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left, as `| head` does
        return EXIT_FAILED


def _commands() -> dict[str, ModuleType]:
    found = sorted(module.name for module in pkgutil.iter_modules(titan.commands.__path__))
    return {**{name: importlib.import_module(f"titan.commands.{name}") for name in found}, "train": launch}


if __name__ == "__main__":
    sys.exit(main())
