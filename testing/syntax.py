"""Replaces a piece of a module's code that is found by its syntax in a function, whatever its names.

    replaced(source, "Mine.step", Piece("scale * loss", "loss"))

The names in the old code stand for any names: the same for the same, others for others. So a piece outlives renames,
and new line breaks and comments. Names of builtins, numbers, strings and operators stand for themselves.
"""

import ast
import builtins
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_NAMES = {"id", "attr", "arg", "name", "asname"}
"""Fields of nodes that hold names."""
_NOT_COMPARED = {"ctx", "kind", "type_comment"}
_BUILTINS = frozenset(dir(builtins))
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_Key = tuple[str, str]
_Nodes = list[ast.expr] | list[ast.stmt]


@dataclass(frozen=True)
class Piece:
    """Code and its replacement.

    old: an expression or statements; a body of `...` stands for any body.  new: the replacement, with the names of
    `old`, and the bodies that its `...` stood for in their order; empty: nothing.  nth, of: which of how many pieces
    of this syntax in the function.
    """

    old: str
    new: str
    nth: int = 1
    of: int = 1


def replaced(source: str, function: str, piece: Piece) -> str:
    """The source of a module with a piece of one function replaced; comments are lost.

    function: name of a function, method ("Class.method") or class (its own lines, without methods); empty for the
    module's own lines. Where the module has no such function, it has another name by now: then it is the one with `of`
    such pieces whose names agree most with `old`, and a warning says which.

    Raises:
        SyntaxError: the new code does not compile there.
        ValueError: the function does not have exactly `of` such pieces, or it is gone and no other one is the nearest;
            or the new code changes nothing.
    """
    old, new = _parsed(piece.old), _parsed(piece.new)
    if not (_is_expression(old) and _is_expression(new)):
        old, new = _as_statements(old), _as_statements(new)
    tree = ast.parse(source)
    before = ast.unparse(tree)
    scopes = _scopes(tree)
    searched = {function: scopes[function]} if function in scopes else scopes
    found = {name: list(_found(old, roots)) for name, roots in searched.items()}
    fitting = [(name, *places[piece.nth - 1]) for name, places in found.items() if len(places) == piece.of]
    nearest = max((meaning.agreeing for *_, meaning in fitting), default=0)
    at = [one for one in fitting if one[2].agreeing == nearest]
    if len(at) != 1:
        raise ValueError(_miss(function, piece, {name: len(places) for name, places in found.items()}))
    ((name, place, meaning),) = at
    if name != function:
        warnings.warn(f"there is no {function}: {piece.old!r} is changed in {name or 'the module'}", stacklevel=2)
    _put(place, len(old), _renamed(new, meaning))
    changed = ast.unparse(ast.fix_missing_locations(tree))
    compile(changed, "the new code", "exec")
    if changed == before:
        raise ValueError(f"{piece.new!r} in place of {piece.old!r} changes nothing")
    return changed


def unknown_names(source: str) -> set[str]:
    """Names that a module reads, and gives to nothing."""
    read: set[str] = set()
    given = {*_BUILTINS, "__file__"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            read.add(node.id)
            continue
        names = [value for name in _NAMES if name != "attr" and isinstance(value := getattr(node, name, None), str)]
        given.update(names, (name.partition(".")[0] for name in names if isinstance(node, ast.alias)))
    return read - given


def _parsed(code: str) -> _Nodes:
    try:
        statements = ast.parse(textwrap.dedent(code)).body
    except SyntaxError as error:
        raise ValueError(f"{code!r} is not Python: {error}; the body of a statement may be `...`") from None
    if len(statements) == 1 and isinstance(statements[0], ast.Expr):
        return [statements[0].value]
    return statements or ast.parse("pass").body


def _is_expression(nodes: _Nodes) -> bool:
    return isinstance(nodes[0], ast.expr)


def _as_statements(nodes: _Nodes) -> list[ast.stmt]:
    return [node if isinstance(node, ast.stmt) else ast.Expr(node) for node in nodes]


def _scopes(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """Functions, methods and classes by their names; several of one name, as overloads, lie in one list."""
    scopes: dict[str, list[ast.AST]] = {"": [tree]}

    def add(node: ast.AST, above: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, _SCOPES):
                add(child, above)
                continue
            name = f"{above}.{child.name}".lstrip(".")
            scopes.setdefault(name, []).append(child)
            if isinstance(child, ast.ClassDef):
                add(child, name)

    add(tree, "")
    return scopes


@dataclass(frozen=True)
class _Place:
    """Where a piece lies: in a field of a node, from an item on where the field is a list."""

    node: ast.AST
    field: str
    at: int | None


@dataclass
class _Meaning:
    """What the names of a pattern stand for, by the kind of node and the name, and its bodies of `...`."""

    names: dict[_Key, str] = field(default_factory=dict)
    bodies: list[list[ast.stmt]] = field(default_factory=list)

    @property
    def agreeing(self) -> int:
        """How many names stand for themselves."""
        return sum(name == there for (_, name), there in self.names.items())

    def binds(self, key: _Key, name: str) -> bool:
        """Whether a name of the pattern may stand for this one, which is then kept."""
        if _BUILTINS & {key[1], name}:
            return key[1] == name
        taken = next((other for other, there in self.names.items() if there == name and other[0] == key[0]), key)
        return taken == key and self.names.setdefault(key, name) == name


def _found(pattern: _Nodes, roots: list[ast.AST]) -> Iterator[tuple[_Place, _Meaning]]:
    for root in roots:
        for place in _places(root, inside=not isinstance(root, (ast.Module, ast.ClassDef))):
            value = getattr(place.node, place.field)
            there = [value] if place.at is None else value[place.at : place.at + len(pattern)]
            meaning = _Meaning()
            if _same(pattern, there, meaning):
                yield place, meaning


def _places(node: ast.AST, *, inside: bool) -> Iterator[_Place]:
    """The places of a scope, in the order of the source. inside: whether functions in it are part of it."""
    for name, value in ast.iter_fields(node):
        for at, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST):
                yield _Place(node, name, at if isinstance(value, list) else None)
                if inside or not isinstance(child, _SCOPES):
                    yield from _places(child, inside=inside)


def _same(pattern: object, there: object, meaning: _Meaning) -> bool:
    if isinstance(pattern, list) and isinstance(there, list):
        if there and _is_any_body(pattern):
            meaning.bodies.append(there)
            return True
        return len(pattern) == len(there) and all(_same(a, b, meaning) for a, b in zip(pattern, there, strict=True))
    if not isinstance(pattern, ast.AST) or type(pattern) is not type(there):
        return type(pattern) is type(there) and pattern == there
    for name, wanted in ast.iter_fields(pattern):
        has = getattr(there, name)
        if name in _NAMES and isinstance(wanted, str) and isinstance(has, str):
            if not meaning.binds((type(pattern).__name__, wanted), has):
                return False
        elif name not in _NOT_COMPARED and not _same(wanted, has, meaning):
            return False
    return True


def _is_any_body(nodes: list[object]) -> bool:
    return (
        len(nodes) == 1
        and isinstance(nodes[0], ast.Expr)
        and isinstance(nodes[0].value, ast.Constant)
        and nodes[0].value.value is ...
    )


def _renamed(nodes: _Nodes, meaning: _Meaning) -> _Nodes:
    """New code with the names, and the bodies, that the old code has in the source."""
    others = {name: there for (_, name), there in meaning.names.items()}
    bodies = iter(meaning.bodies)

    def new(value: Any, kind: str, field: str) -> Any:
        if isinstance(value, list):
            return next(bodies, value) if _is_any_body(value) else [new(item, kind, field) for item in value]
        if isinstance(value, ast.AST):
            kind = type(value).__name__
            return type(value)(**{name: new(inner, kind, name) for name, inner in ast.iter_fields(value)})
        if field in _NAMES and isinstance(value, str):
            return meaning.names.get((kind, value), others.get(value, value))
        return value

    return [new(node, "", "") for node in nodes]


def _put(place: _Place, count: int, new: _Nodes) -> None:
    if place.at is None:
        setattr(place.node, place.field, new[0])
    else:
        getattr(place.node, place.field)[place.at : place.at + count] = new


def _miss(function: str, piece: Piece, counts: dict[str, int]) -> str:
    if list(counts) == [function]:
        where = f"{function or 'the module'} has it {counts[function]} times, whatever its names"
    else:
        having = ", ".join(f"{name or 'the module'} ({count})" for name, count in counts.items() if count)
        where = f"there is no function {function}, and others have it: {having or 'none'}"
    if _is_expression(_parsed(piece.old)) and not _is_expression(_parsed(piece.new)):
        where += ", as a statement of its own, since the new code is no expression"
    return f"{piece.old!r}: {where}, required: {piece.of}; name another function, or a longer piece around it"
