"""Which file of titan imports which, by unit: counted, held against the table in docs/design.md, and drawn.

    python -m bench.house                            units, imports between them, what runs upward, circles
    python -m bench.house --plot docs/house.svg      and the picture of docs/design.md
    python -m bench.house --root DIR --entries       of another checkout, each entry of its titan/ taken for a unit

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
FOLDERS = ("titan", "inference", "planner", "testing")
"""What the table lists. `planner/` is installed as `titan.planner`, as `plugins/` is `titan.plugins`."""

_ROW = re.compile(rf"\| `((?:{'|'.join(FOLDERS)})/(?:[\w/]+(?:\.py)?)?)` \|", re.ASCII)


# --- reading ------------------------------------------------------------------------------------------------------


def units_of(root: Path) -> list[str]:
    """The units that docs/design.md lists, from the ground up."""
    return _ROW.findall((root / TABLE).read_text(encoding="utf-8"))


def entries_of(root: Path) -> list[str]:
    """The files and packages of titan/, each taken for a unit, lowest first as far as circles allow."""
    entries = [path for path in sorted((root / "titan").iterdir()) if path.suffix == ".py" or any(path.glob("*.py"))]
    left = [path.relative_to(root).as_posix() + ("/" if path.is_dir() else "") for path in entries]
    above = {(unit_of(f, left), unit_of(o, left)) for f, others in imports_of_files(root).items() for o in others}
    ordered: list[str] = []
    while left:
        lowest = min(left, key=lambda unit: sum((unit, other) in above for other in left if other != unit))
        ordered.append(lowest)
        left.remove(lowest)
    return ordered


def unit_of(file: str, units: Sequence[str]) -> str | None:
    """The innermost unit that a file lies in; None where it lies in none, or only announces its folder's units."""
    fitting = [unit for unit in units if file == unit or (unit.endswith("/") and file.startswith(unit))]
    return max(fitting, key=len, default=None)


@functools.cache
def parsed(source: str) -> ast.Module:
    """The syntax tree of a file's source text; cached."""
    return ast.parse(source)


def dotted_package_of(file: Path) -> list[str]:
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
            package = dotted_package_of(file)
            above = package[: len(package) - node.level + 1] if node.level else []
            module = [*above, *(node.module.split(".") if node.module else ())]
            for alias in node.names:
                yield node.lineno, [*module, alias.name]


def files_of(root: Path, folder: str) -> Iterator[tuple[Path, ast.Module]]:
    """(path from the root, syntax tree) of every Python file in a folder."""
    for file in sorted((root / folder).rglob("*.py")):
        yield file.relative_to(root), parsed(file.read_text(encoding="utf-8"))


def imports_of_files(root: Path) -> dict[str, dict[str, int]]:
    """File -> file of `FOLDERS` that it imports -> the first line that does."""
    files = {file.as_posix(): (file, tree) for folder in FOLDERS for file, tree in files_of(root, folder)}
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
        beside = parts[0] == "titan" and length > 1 and parts[1] in FOLDERS
        path = "/".join(parts[beside:length])
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if name in files:
                return name
    return None


def circles(edges: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Groups of files that reach each other by imports (Tarjan's strongly connected components of two or more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges[name]:
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

    for name in edges:
        if name not in index:
            visit(name)
    return found


# --- the graph ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImportGraph:
    """The packages and files of a checkout (units) and the imports between them.

    layers: unit -> the lowest layer above all units that it imports.  edges: (unit, unit that it imports) -> number of
    importing files.  upward: imports against the order of the table, as `file:line imports file`.  circles: units that
    import each other.
    """

    units: Sequence[str]
    top_level: int
    files: int
    median_lines: float
    layers: Mapping[str, int]
    edges: Mapping[tuple[str, str], int]
    upward: Sequence[str]
    circles: Sequence[Sequence[str]]


def graph_of(root: Path, units: Sequence[str]) -> ImportGraph:
    """Read the imports of a checkout, by unit. units: paths of packages and files, lowest first."""
    edges = imports_of_files(root)
    place = {unit: number for number, unit in enumerate(units)}
    between: Counter[tuple[str, str]] = Counter()
    upward = []
    for file, others in edges.items():
        for other, line in others.items():
            ours, theirs = unit_of(file, units), unit_of(other, units)
            if ours is None or theirs is None or ours == theirs:
                continue
            between[ours, theirs] += 1
            if place[theirs] > place[ours]:
                upward.append(f"{file}:{line} imports {other}")
    lines = [len((root / file).read_text(encoding="utf-8").splitlines()) for file in edges]
    top_level = {file.split("/")[1] for file in edges} - {"__init__.py"}
    return ImportGraph(
        units,
        len(top_level),
        len(edges),
        statistics.median(lines),
        _layers(units, between),
        between,
        upward,
        circles(edges),
    )


def _layers(units: Sequence[str], edges: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Each unit one above the highest that it imports and that the table lists before it."""
    layers: dict[str, int] = {}
    for unit in units:
        layers[unit] = 1 + max((layers[low] for high, low in edges if high == unit and low in layers), default=-1)
    return layers


def needed(edges: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
    """The edges that no chain of others implies."""
    below: dict[str, set[str]] = {}
    for high, low in edges:
        below.setdefault(high, set()).add(low)

    def reaches(start: str, end: str, seen: set[str]) -> bool:
        for low in below.get(start, ()):
            if low == end or (low not in seen and not seen.add(low) and reaches(low, end, seen)):
                return True
        return False

    return [(h, low) for h, low in edges if not any(reaches(other, low, {h}) for other in below[h] - {low})]


# --- what is shown ------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, GAP, LAYER_HEIGHT, MARGIN = 168, 30, 22, 78, 20


def picture(graph: ImportGraph) -> str:
    """The graph as SVG, one row per layer, without edges that others imply and edges to the lowest layer."""
    top = max(graph.layers.values())
    rows = [[unit for unit in graph.units if graph.layers[unit] == layer] for layer in range(top + 1)]
    wide = max(len(row) for row in rows) * (WIDTH + GAP) - GAP + 2 * MARGIN
    at: dict[str, tuple[float, float]] = {}
    for layer, row in enumerate(rows):
        left = (wide - len(row) * (WIDTH + GAP) + GAP) / 2
        for number, unit in enumerate(row):
            at[unit] = (left + number * (WIDTH + GAP), MARGIN + (top - layer) * LAYER_HEIGHT)
    high = 2 * MARGIN + top * LAYER_HEIGHT + HEIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" font-family="sans-serif">',
        "<title>Packages of titan and the imports between them</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#789"/></marker></defs>',
        f'<rect width="{wide:.0f}" height="{high:.0f}" fill="#fff"/>',
    ]
    for upper, lower in needed({pair: n for pair, n in graph.edges.items() if graph.layers[pair[1]]}):
        (x, y), (u, v) = at[upper], at[lower]
        x, y, u = x + WIDTH / 2, y + HEIGHT, u + WIDTH / 2
        bend = max(24.0, (v - y) / 2)
        out.append(
            f'<path d="M{x:.0f} {y:.0f} C{x:.0f} {y + bend:.0f} {u:.0f} {v - bend:.0f} {u:.0f} {v:.0f}" fill="none"'
            ' stroke="#9ab" marker-end="url(#tip)"/>'
        )
    for unit, (x, y) in at.items():
        out.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="#eef3f8" stroke="#567"/>'
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 20:.0f}" text-anchor="middle" font-size="13">'
            f"{html.escape(unit.removeprefix('titan/').removesuffix('/'))}</text>"
        )
    return "\n".join([*out, "</svg>", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Count, and draw where asked; 1 when an import runs upward or a circle closes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="the checkout; default: this one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw it, as SVG")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--entries", action="store_true", help="take each entry of titan/ for a unit")
    args = parser.parse_args(argv)
    graph = graph_of(args.root, entries_of(args.root) if args.entries else units_of(args.root))
    if args.plot:
        args.plot.write_text(picture(graph), encoding="utf-8")
    if args.json:
        print(json.dumps({**asdict(graph), "edges": [[*pair, n] for pair, n in graph.edges.items()]}))
        return 0
    for unit in reversed(graph.units):
        below = sorted({low for high, low in graph.edges if high == unit}, key=graph.units.index)
        names = " ".join(low.removeprefix("titan/").removesuffix("/") for low in below)
        print(f"{graph.layers[unit]:3}  {unit:28} {names}")
    print(
        f"{graph.top_level} entries in titan/, {len(graph.units)} units on {max(graph.layers.values()) + 1} layers, "
        f"{len(graph.edges)} edges, {len(graph.upward)} upward, {len(graph.circles)} circles; "
        f"{graph.files} files, median {graph.median_lines:.0f} lines"
    )
    for sentence in (*graph.upward, *(f"circle: {', '.join(group)}" for group in graph.circles)):
        print(sentence)
    return 1 if graph.upward or graph.circles else 0


if __name__ == "__main__":
    sys.exit(main())
