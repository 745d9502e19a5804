"""Reads the pickles of a checkpoint without executing them.

A pickle is a program, and Python's unpickler runs it: it imports, calls and sets what the program names. Here the
same opcodes build a tree of plain data. A class or function stays its name; "make one of these" and "call
this" become a `Record` of that name; a dict becomes pairs. Names that the caller does not know are refused, and so is
every opcode that a checkpoint does not need.

Opcodes: Python's Lib/pickletools.py. Takes about six times as long as the unpickler in C.
"""

import pickle
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from titan.errors import CheckpointError

PERSISTENT = "persistent id"
"""Name of the record that stands for an object kept elsewhere: its only argument says which."""

_LONGEST_NUMBER = 8
_NEWEST_PROTOCOL = 5


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function a pickle speaks of, as `module.name`."""

    full: str


@dataclass(eq=False, slots=True)
class Record:
    """An object a pickle asks for: what it would be made by and from, and the state it would then be given."""

    maker: str
    args: tuple[Any, ...]
    state: Any = None


class Pairs(list[tuple[Any, Any]]):
    """Keys and values of a dict, in order; nothing is hashed, and a key can stand there twice."""


def read(data: bytes, known: Collection[str], where: str) -> Any:
    """The tree that a pickle describes: None, bool, int, str, tuple, list, Pairs, Name and Record.

    known: the names `module.name` it may speak of.  where: the file, for messages.
    Raises CheckpointError: it speaks of another name, or is no pickle that a writer of checkpoints leaves.
    """
    machine = _Machine(data, known, where)
    try:
        return machine.run()
    except (IndexError, TypeError, ValueError, AttributeError) as error:  # not the shape that an opcode works on
        raise machine.refused(f"is not a valid pickle ({error})") from error


class _Machine:
    """Stack, marks and memo of a pickle's opcodes. Its size is bounded by that of the data: no opcode names a size."""

    def __init__(self, data: bytes, known: Collection[str], where: str) -> None:
        self.data, self.known, self.where = data, known, where
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def refused(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where} {what}, at byte {self.at}")

    def run(self) -> Any:
        while True:
            code = self.byte()
            if code == pickle.STOP[0]:
                break
            act = _ACTS.get(code)
            if act is None:
                raise self.refused(f"has the pickle opcode {bytes([code])!r}, which a checkpoint may not contain")
            act(self)
        if len(self.stack) != 1 or self.marks or self.at != len(self.data):
            raise self.refused("is a pickle with unused data")
        return self.stack[0]

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            raise self.refused("is a truncated pickle")
        self.at += count
        return found

    def number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        return (self.take(end - self.at), self.take(1))[0].decode("ascii")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def protocol(self) -> None:
        version = self.byte()
        if version > _NEWEST_PROTOCOL:
            raise self.refused(f"is a pickle of protocol {version}, newer than {_NEWEST_PROTOCOL}")

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def text(self, size: int) -> None:
        self.push(self.take(self.number(size)).decode("utf-8"))

    def long(self) -> None:
        size = self.byte()
        if size > _LONGEST_NUMBER:
            raise self.refused(f"has a number of {size} bytes")
        self.push(self.number(size, signed=True))

    def tuple_of(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) != count:
            raise self.refused("pops from an empty stack")
        self.stack[-count:] = [items]

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise self.refused(f"appends to a {type(target).__name__}")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not Pairs or len(items) % 2:
            raise self.refused(f"sets an item of a {type(target).__name__}")
        target.extend(zip(items[::2], items[1::2], strict=True))

    def name(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}"
        if type(module) is not str or type(name) is not str or full not in self.known:
            raise self.refused(f"names {full[:200]!r}, which a checkpoint may not contain")
        self.push(Name(full))

    def stack_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name(module, name)

    def make(self) -> None:
        args, maker = self.stack.pop(), self.stack.pop()
        if type(maker) is not Name or type(args) is not tuple:
            raise self.refused(f"calls a {type(maker).__name__}")
        self.push(Record(maker.full, args))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Record or target.state is not None:
            raise self.refused(f"sets the state of a {type(target).__name__}")
        target.state = state

    def store(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def load(self, place: int) -> None:
        if place not in self.memo:
            raise self.refused(f"reads memo entry {place}, which was never written")
        self.push(self.memo[place])


_ACTS: dict[int, Callable[[_Machine], Any]] = {
    code[0]: act
    for code, act in (
        (pickle.PROTO, _Machine.protocol),
        (pickle.FRAME, lambda m: m.take(8)),
        (pickle.MARK, _Machine.mark),
        (pickle.NONE, lambda m: m.push(None)),
        (pickle.NEWTRUE, lambda m: m.push(True)),
        (pickle.NEWFALSE, lambda m: m.push(False)),
        (pickle.BININT, lambda m: m.push(m.number(4, signed=True))),
        (pickle.BININT1, lambda m: m.push(m.byte())),
        (pickle.BININT2, lambda m: m.push(m.number(2))),
        (pickle.LONG1, _Machine.long),
        (pickle.BINUNICODE, lambda m: m.text(4)),
        (pickle.SHORT_BINUNICODE, lambda m: m.text(1)),
        (pickle.EMPTY_TUPLE, lambda m: m.push(())),
        (pickle.TUPLE1, lambda m: m.tuple_of(1)),
        (pickle.TUPLE2, lambda m: m.tuple_of(2)),
        (pickle.TUPLE3, lambda m: m.tuple_of(3)),
        (pickle.TUPLE, lambda m: m.push(tuple(m.since_mark()))),
        (pickle.EMPTY_LIST, lambda m: m.push([])),
        (pickle.APPEND, lambda m: m.append([m.stack.pop()])),
        (pickle.APPENDS, lambda m: m.append(m.since_mark())),
        (pickle.EMPTY_DICT, lambda m: m.push(Pairs())),
        (pickle.SETITEM, lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()])),
        (pickle.SETITEMS, lambda m: m.set_items(m.since_mark())),
        (pickle.GLOBAL, lambda m: m.name(m.line(), m.line())),
        (pickle.STACK_GLOBAL, _Machine.stack_name),
        (pickle.NEWOBJ, _Machine.make),
        (pickle.REDUCE, _Machine.make),
        (pickle.BUILD, _Machine.build),
        (pickle.BINPERSID, lambda m: m.push(Record(PERSISTENT, (m.stack.pop(),)))),
        (pickle.MEMOIZE, lambda m: m.store(len(m.memo))),
        (pickle.BINPUT, lambda m: m.store(m.byte())),
        (pickle.LONG_BINPUT, lambda m: m.store(m.number(4))),
        (pickle.BINGET, lambda m: m.load(m.byte())),
        (pickle.LONG_BINGET, lambda m: m.load(m.number(4))),
    )
}
