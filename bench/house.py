"""Which file of `titan/` imports which, by room: counted, held against the table in docs/design.md, and drawn.

    python -m bench.house                            rooms, arrows between them, what runs upward, circles
    python -m bench.house --plot docs/house.svg      and the picture of docs/design.md
    python -m bench.house --root DIR --entries       of another checkout, each entry of its titan/ taken for a room

Reads the syntax trees alone. Imports in functions and those that only a type checker sees count like all others.
"""

import argparse
import ast
import functools
import html
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = "docs/design.md"
_ROW = re.compile(r"\| `(titan/[\w/]+(?:\.py)?)` \|", re.ASCII)


# --- reading ------------------------------------------------------------------------------------------------------


def rooms_of(root: Path) -> list[str]:
    """The rooms that docs/design.md lists, from the ground up."""
    return _ROW.findall((root / TABLE).read_text(encoding="utf-8"))


def entries_of(root: Path) -> list[str]:
    """The files and packages of titan/, each taken for a room, lowest first as far as circles allow."""
    entries = [path for path in sorted((root / "titan").iterdir()) if path.suffix == ".py" or any(path.glob("*.py"))]
    left = [path.relative_to(root).as_posix() + ("/" if path.is_dir() else "") for path in entries]
    above = {(room_of(f, left), room_of(o, left)) for f, others in arrows_of(root).items() for o in others}
    ordered: list[str] = []
    while left:
        lowest = min(left, key=lambda room: sum((room, other) in above for other in left if other != room))
        ordered.append(lowest)
        left.remove(lowest)
    return ordered


def room_of(file: str, rooms: Sequence[str]) -> str | None:
    """The innermost room that a file lies in; None where it lies in none, or only announces its folder's rooms."""
    fitting = [room for room in rooms if file == room or (room.endswith("/") and file.startswith(room))]
    return max(fitting, key=len, default=None)


@functools.cache
def parsed(source: str) -> ast.Module:
    """The syntax tree of a file's source text; cached."""
    return ast.parse(source)


def package_of(file: Path) -> list[str]:
    """The dotted name, in parts, of the package a file lies in; `plugins/` is `titan.plugins`."""
    parts = [*file.parent.parts]
    return parts if parts[0] == "titan" else ["titan", *parts]


def imports(file: Path, tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """(line, dotted name in parts) of everything that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            package = package_of(file)
            above = package[: len(package) - node.level + 1] if node.level else []
            module = [*above, *(node.module.split(".") if node.module else ())]
            for alias in node.names:
                yield node.lineno, [*module, alias.name]


def files_of(root: Path, folder: str) -> Iterator[tuple[Path, ast.Module]]:
    """(path from the root, syntax tree) of every Python file in a folder."""
    for file in sorted((root / folder).rglob("*.py")):
        yield file.relative_to(root), parsed(file.read_text(encoding="utf-8"))


def arrows_of(root: Path) -> dict[str, dict[str, int]]:
    """File -> file of `titan/` that it imports -> the first line that does."""
    files = {file.as_posix(): (file, tree) for file, tree in files_of(root, "titan")}
    found: dict[str, dict[str, int]] = {name: {} for name in files}
    for name, (file, tree) in files.items():
        for line, parts in imports(file, tree):
            target = _file_of(parts, files)
            if target is not None and target not in (name, "titan/__init__.py"):
                found[name].setdefault(target, line)
    return found


def _file_of(parts: Sequence[str], files: Mapping[str, object]) -> str | None:
    """The file that holds what a dotted name names: the module itself, or the one it is taken from."""
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length])
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if name in files:
                return name
    return None


def circles(arrows: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Groups of files that reach each other by imports (Tarjan's strongly connected components of two or more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in arrows[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in arrows:
        if name not in index:
            visit(name)
    return found


# --- the house ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class House:
    """The rooms of a checkout. floors: room -> the lowest floor above all that it imports. arrows: (room, room it
    imports) -> how many imports of files. upward: arrows against the table's order, as `file:line imports file`."""

    rooms: Sequence[str]
    doors: int
    files: int
    median_lines: float
    floors: Mapping[str, int]
    arrows: Mapping[tuple[str, str], int]
    upward: Sequence[str]
    circles: Sequence[Sequence[str]]


def house_of(root: Path, rooms: Sequence[str]) -> House:
    """Read the imports of a checkout, by room. rooms: paths of packages and files, lowest first."""
    arrows = arrows_of(root)
    place = {room: number for number, room in enumerate(rooms)}
    between: Counter[tuple[str, str]] = Counter()
    upward = []
    for file, others in arrows.items():
        for other, line in others.items():
            ours, theirs = room_of(file, rooms), room_of(other, rooms)
            if ours is None or theirs is None or ours == theirs:
                continue
            between[ours, theirs] += 1
            if place[theirs] > place[ours]:
                upward.append(f"{file}:{line} imports {other}")
    lines = [len((root / file).read_text(encoding="utf-8").splitlines()) for file in arrows]
    doors = {file.split("/")[1] for file in arrows} - {"__init__.py"}
    return House(
        rooms, len(doors), len(arrows), statistics.median(lines), _floors(rooms, between), between, upward,
        circles(arrows),
    )  # fmt: skip


def _floors(rooms: Sequence[str], arrows: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Each room one above the highest that it imports and that the table lists before it."""
    floors: dict[str, int] = {}
    for room in rooms:
        floors[room] = 1 + max((floors[low] for high, low in arrows if high == room and low in floors), default=-1)
    return floors


def needed(arrows: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
    """The arrows that no chain of others implies."""
    below: dict[str, set[str]] = {}
    for high, low in arrows:
        below.setdefault(high, set()).add(low)

    def reaches(start: str, end: str, seen: set[str]) -> bool:
        for low in below.get(start, ()):
            if low == end or (low not in seen and not seen.add(low) and reaches(low, end, seen)):
                return True
        return False

    return [(h, low) for h, low in arrows if not any(reaches(other, low, {h}) for other in below[h] - {low})]


# --- what is shown ------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, GAP, FLOOR, MARGIN = 168, 30, 22, 78, 20


def picture(house: House) -> str:
    """The house as SVG: a row a floor. Left out: arrows that others imply, and those to the ground, which all have."""
    top = max(house.floors.values())
    rows = [[room for room in house.rooms if house.floors[room] == floor] for floor in range(top + 1)]
    wide = max(len(row) for row in rows) * (WIDTH + GAP) - GAP + 2 * MARGIN
    at: dict[str, tuple[float, float]] = {}
    for floor, row in enumerate(rows):
        left = (wide - len(row) * (WIDTH + GAP) + GAP) / 2
        for number, room in enumerate(row):
            at[room] = (left + number * (WIDTH + GAP), MARGIN + (top - floor) * FLOOR)
    high = 2 * MARGIN + top * FLOOR + HEIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" font-family="sans-serif">',
        "<title>Rooms of titan/ and the imports between them</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#789"/></marker></defs>',
        f'<rect width="{wide:.0f}" height="{high:.0f}" fill="#fff"/>',
    ]
    for upper, lower in needed({pair: n for pair, n in house.arrows.items() if house.floors[pair[1]]}):
        (x, y), (u, v) = at[upper], at[lower]
        x, y, u = x + WIDTH / 2, y + HEIGHT, u + WIDTH / 2
        bend = max(24.0, (v - y) / 2)
        out.append(
            f'<path d="M{x:.0f} {y:.0f} C{x:.0f} {y + bend:.0f} {u:.0f} {v - bend:.0f} {u:.0f} {v:.0f}" fill="none"'
            ' stroke="#9ab" marker-end="url(#tip)"/>'
        )
    for room, (x, y) in at.items():
        out.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="#eef3f8" stroke="#567"/>'
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 20:.0f}" text-anchor="middle" font-size="13">'
            f"{html.escape(room.removeprefix('titan/').removesuffix('/'))}</text>"
        )
    return "\n".join([*out, "</svg>", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Count, and draw where asked; 1 when an import runs upward or a circle closes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="the checkout; default: this one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw it, as SVG")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--entries", action="store_true", help="take each entry of titan/ for a room")
    args = parser.parse_args(argv)
    house = house_of(args.root, entries_of(args.root) if args.entries else rooms_of(args.root))
    if args.plot:
        args.plot.write_text(picture(house), encoding="utf-8")
    if args.json:
        print(json.dumps({**asdict(house), "arrows": [[*pair, n] for pair, n in house.arrows.items()]}))
        return 0
    for room in reversed(house.rooms):
        below = sorted({low for high, low in house.arrows if high == room}, key=house.rooms.index)
        names = " ".join(low.removeprefix("titan/").removesuffix("/") for low in below)
        print(f"{house.floors[room]:3}  {room:28} {names}")
    print(
        f"{house.doors} entries in titan/, {len(house.rooms)} rooms on {max(house.floors.values()) + 1} floors, "
        f"{len(house.arrows)} arrows, {len(house.upward)} upward, {len(house.circles)} circles; "
        f"{house.files} files, median {house.median_lines:.0f} lines"
    )
    for sentence in (*house.upward, *(f"circle: {', '.join(group)}" for group in house.circles)):
        print(sentence)
    return 1 if house.upward or house.circles else 0


if __name__ == "__main__":
    sys.exit(main())
