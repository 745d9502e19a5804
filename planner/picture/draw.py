"""The layout of a job as an SVG: nodes as frames, ranks as cells, and the groups of ranks that communicate.

A cell has a box for the weights (a column per layer, slices from top to bottom), one for stacks of weights that an axis
deals out anew, and one for the batch (samples from top to bottom, positions from left to right). What is the same on
two ranks has the same color. Nothing here knows an axis or a plugin by name.
"""

import colorsys
import html
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from titan.config import Job
from titan.contracts.base.cost import Costs, Matmul
from titan.contracts.base.layout import Layout
from titan.errors import ConfigError, by_errno
from titan.planner.machine.cluster import Cluster
from titan.planner.picture.holdings import Exchange, Holding, Part, exchanges, holdings
from titan.planner.step.layout import costs_of

MOST_CELLS = 64
"""Ranks of a layout that are all drawn; of more, the first and the last node."""
MOST_AT_AN_END = 16
"""Ranks of such a node that are drawn."""
NODE = 8
"""Ranks taken for a node where the cluster file has no nodes."""

BOX, PAD, LINE, MARGIN, GAP = 168, 9, 14, 18, 10
CELL = BOX + 2 * PAD
MOST_RUNS = 3
"""Stages of a rank whose layers fit into a line of a cell."""
TALL, FLAT = 38, 24
"""Heights of the boxes of weights, and of stacks and batch."""
SQUARE, MOST_STRIP = 22, 1100
"""The largest square of a rank in a strip of groups, and the widest strip."""
NAMES_WIDTH = 330
WEIGHTS, BATCH, GROUPS = 0.58, 0.08, 0.38
"""The first hue of each kind of color."""


def draw_layout(job: Job, cluster: Cluster, path: Path) -> None:
    """Write the picture of a job's layout.

    path: an .svg file; its folder is created.

    Raises:
        ConfigError: another suffix, the file cannot be written, or the model's spec states no operations.
    """
    if path.suffix != ".svg":
        raise ConfigError(f"{path}: the suffix must be .svg", "--draw")
    text = layout_picture(job, cluster)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"{path}: cannot be written: {error.strerror}"
        raise by_errno(error, ConfigError(what, "--draw")) from None


def layout_picture(job: Job, cluster: Cluster) -> str:
    """The SVG of a job's layout on nodes of the cluster. Each rank drawn is a group with the id `rank-N`.

    Raises:
        ConfigError: the model's spec states no operations.
    """
    costs, layout = costs_of(job), job.layout
    node = cluster.ranks_per_node or layout.world_size
    ranks = _shown(layout.world_size, cluster.ranks_per_node or NODE)
    held = list(holdings(layout, costs, ranks))
    cells = _Cells(job, costs, held)
    frames: dict[int, list[Holding]] = {}
    for one in held:
        frames.setdefault(one.rank // node, []).append(one)
    page = _Page()
    _head(page, job, node, held)
    _frames(page, frames, cells)
    _exchanges(page, exchanges(layout, costs), ranks, node)
    return page.svg(f"Layout {layout}")


def _shown(world: int, node: int) -> list[int]:
    """The ranks that are drawn."""
    end = min(node, MOST_AT_AN_END)
    return list(range(world)) if world <= MOST_CELLS else [*range(end), *range(world - end, world)]


# --- the page -----------------------------------------------------------------------------------------------------


class _Page:
    """Lines of an SVG, and how far down and to the right they reach."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.y, self.right = float(MARGIN), 0.0

    def text(self, x: float, y: float, words: str, size: int = 11, *, bold: bool = False, gray: bool = False) -> None:
        style = ' font-weight="bold"' * bold + ' fill="#667"' * gray
        self.right = max(self.right, x + len(words) * size * 0.54)
        self.lines.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}"{style}>{html.escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, edge: str = "") -> None:
        stroke = f' stroke="{edge}"' if edge else ""
        self.right = max(self.right, x + width)
        self.lines.append(
            f'<rect x="{round(x, 2):g}" y="{round(y, 2):g}" width="{round(width, 2):g}" height="{round(height, 2):g}" '
            f'fill="{fill}"{stroke}/>'
        )

    def svg(self, title: str) -> str:
        wide, high = round(self.right + MARGIN), round(self.y + MARGIN)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif">',
                f"<title>{html.escape(title)}</title>",
                f'<rect width="{wide}" height="{high}" fill="#fff"/>',
                *self.lines,
                "</svg>",
                "",
            ]
        )


def _colors(keys: Sequence[Hashable], first: float) -> Callable[[Hashable], tuple[str, str]]:
    """(dark, light) for each key: hues at equal distances, from `first` on."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}

    def of(key: Hashable) -> tuple[str, str]:
        hue = (first + numbers[key] / len(numbers)) % 1
        return _hex(hue, 0.55, 0.5), _hex(hue, 0.65, 0.84)

    return of


def _hex(hue: float, saturation: float, lightness: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, saturation))


# --- head ---------------------------------------------------------------------------------------------------------


def _head(page: _Page, job: Job, node: int, held: Sequence[Holding]) -> None:
    """The layout, what its axes do, and how to read the boxes."""
    layout, world = job.layout, job.layout.world_size
    nodes = -(-world // node)
    said = f"{layout}: {world:,} ranks" + (f" on {nodes:,} nodes of {node:,}" if nodes > 1 else "")
    page.y += 6
    page.text(MARGIN, page.y, said, 15, bold=True)
    above = [axis for axis in layout.axes if layout.degrees[axis.name] > 1]
    many = "micro batches" if job.micro_batches > 1 else "micro batch"
    for line in (
        f"a step: {job.train.global_batch_size:,} samples of {job.data.seq_len:,} positions; "
        f"on each rank {job.micro_batches} {many} of {job.micro_batch}",
        *(f"{axis.name} {layout.degrees[axis.name]}: {axis.doc}" for axis in above),
        *_legend(held[0]),
        *([f"drawn: the first and the last {len(held) // 2} of {world:,} ranks"] if len(held) < world else []),
    ):
        page.y += LINE
        page.text(MARGIN, page.y, line, gray=True)
    page.y += GAP


def _legend(one: Holding) -> list[str]:
    """How to read the boxes; one: any rank's holding, as all have the same boxes."""
    return [
        "first box: weights, a column for the embeddings, each layer and the head; slices from top to bottom",
        *(["second box: stacks of weights, as of experts, in the same columns"] if one.folded else []),
        *(["dark weights: kept between steps; light ones: gathered for use"] if one.kept.of > 1 else []),
        "last box: the batch, samples from top to bottom, positions from left to right",
        *(["dark tokens: hidden states between split matrices"] if one.hidden != one.positions else []),
        *(["parts of a sequence have equal size; their plugin chooses the positions"] if one.positions.of > 1 else []),
        "in boxes of one kind, the same color is the same content",
    ]


# --- cells --------------------------------------------------------------------------------------------------------


class _Cells:
    """Draws what ranks hold, all cells alike.

    height: of a cell.
    """

    def __init__(self, job: Job, costs: Costs, held: Sequence[Holding]) -> None:
        self.job, self.columns = job, 2 + sum(len(stage.layers) for stage in costs.stages)
        self.names = _Names(job.layout)
        self.stack = max((op.stack for op in costs.layer if isinstance(op, Matmul)), default=1)
        self.weights = _colors([(one.layers, one.sliced, one.own) for one in held], WEIGHTS)
        self.folded = _colors([(one.layers, one.sliced, one.own, one.folded) for one in held], WEIGHTS)
        self.batch = _colors([(one.samples, one.positions) for one in held], BATCH)
        self.height = self._draw(_Page(), held[0], 0, 0)

    def draw(self, page: _Page, one: Holding, x: float, y: float) -> None:
        """A cell with its upper left corner at x, y."""
        page.lines.append(f'<g id="rank-{one.rank}">')
        page.box(x, y, CELL, self.height, "#fff", "#99a")
        self._draw(page, one, x + PAD, y)
        page.lines.append("</g>")

    def _draw(self, page: _Page, one: Holding, x: float, y: float) -> float:
        """What is inside; returns its height."""
        top = y
        y += LINE + 2
        page.text(x, y, f"rank {one.rank}", 12, bold=True)
        y += 5
        self._weights(page, one, one.sliced, one.kept, (x, y, TALL), self.weights((one.layers, one.sliced, one.own)))
        y = self._lines(page, x, y + TALL, self._of_weights(one))
        if one.folded is not None and one.kept_folded is not None:
            both = one.folded.within(one.sliced)
            colors = self.folded((one.layers, one.sliced, one.own, one.folded))
            self._weights(page, one, both, one.kept_folded, (x, y + 6, FLAT), colors)
            y = self._lines(page, x, y + 6 + FLAT, self._of_folded(one.folded, one.kept_folded))
        self._batch(page, one, x, y + 6)
        return self._lines(page, x, y + 6 + FLAT, self._of_batch(one)) + 7 - top

    def _lines(self, page: _Page, x: float, y: float, lines: Sequence[str]) -> float:
        for line in lines:
            y += LINE
            page.text(x, y, line)
        return y

    def _weights(
        self, page: _Page, one: Holding, part: Part, kept: Part, at: tuple[float, float, float], colors: tuple[str, str]
    ) -> None:
        """Columns of what the rank has, at the height of its part; darker what it keeps."""
        x, y, high = at
        page.box(x, y, BOX, high, "#eef0f3")
        each, slice_ = BOX / self.columns, high / part.of
        held = [held for held in one.layers if held]
        runs = [(1 + layers.start, len(layers)) for layers in held]
        runs += [(0, 1)] * one.embeddings + [(self.columns - 1, 1)] * one.head
        for first, count in _joined(runs):
            left, upper, wide = x + first * each, y + part.number * slice_, count * each
            page.box(left, upper, wide, slice_, colors[1])
            page.box(left, upper + kept.number * slice_ / kept.of, wide, max(1.0, slice_ / kept.of), colors[0])

    def _batch(self, page: _Page, one: Holding, x: float, y: float) -> None:
        page.box(x, y, BOX, FLAT, "#eef0f3")
        dark, light = self.batch((one.samples, one.positions))
        upper, high = y + FLAT * one.samples.number / one.samples.of, max(1.0, FLAT / one.samples.of)
        page.box(x + BOX * one.positions.number / one.positions.of, upper, BOX / one.positions.of, high, light)
        page.box(x + BOX * one.hidden.number / one.hidden.of, upper, BOX / one.hidden.of, high, dark)

    def _of_weights(self, one: Holding) -> list[str]:
        lines = [_layers(one.layers), " and ".join(["with embeddings"] * one.embeddings + ["head"] * one.head)]
        if not one.embeddings and one.head:
            lines[1] = "with head"
        if one.sliced.of > 1:
            lines.append(f"slice {_of(one.sliced)} of matrices ({self.names.slices})")
        if one.own.of > 1:
            lines.append(f"own weights, {_of(one.own)} ({self.names.own})")
        return [*lines, f"keeps shard {_of(one.kept)}"] if one.kept.of > 1 else lines

    def _of_folded(self, folded: Part, kept: Part) -> list[str]:
        if self.stack > 1 and self.stack % folded.of == 0:
            each = self.stack // folded.of
            mine = f"{_range(range(folded.number * each, (folded.number + 1) * each))} of {self.stack}"
        else:
            mine = _of(folded)
        lines = [f"stack elements {mine} ({self.names.folding})"]
        return [*lines, f"keeps shard {_of(kept)}"] if kept.of > 1 else lines

    def _of_batch(self, one: Holding) -> list[str]:
        size, length = self.job.train.global_batch_size, self.job.data.seq_len
        each = size // one.samples.of
        lines = [f"samples {_range(range(one.samples.number * each, (one.samples.number + 1) * each))} of {size}"]
        if one.positions.of > 1:
            lines.append(f"{length // one.positions.of} positions, part {_of(one.positions)}")
        else:
            lines.append(f"all {length} positions")
        if one.hidden != one.positions:
            lines.append(f"hidden states: {length // one.hidden.of} positions")
        return lines


class _Names:
    """Names of the axes above 1 by what they do to weights, for labels."""

    def __init__(self, layout: Layout) -> None:
        above = [axis for axis in layout.axes if layout.degrees[axis.name] > 1]
        self.slices = " x ".join(axis.name for axis in above if axis.weights == "slices" and not axis.folds)
        self.folding = " x ".join(axis.name for axis in above if axis.folds)
        self.own = " x ".join(axis.name for axis in above if axis.weights == "own")


def _joined(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first column, columns) with neighbors made one."""
    joined: list[tuple[int, int]] = []
    for first, count in sorted(runs):
        if joined and sum(joined[-1]) == first:
            joined[-1] = joined[-1][0], joined[-1][1] + count
        else:
            joined.append((first, count))
    return joined


def _layers(runs: Sequence[range]) -> str:
    """`layers 0-3, 8-11`; of many stages, how many layers."""
    held = [layers for layers in runs if layers]
    if len(held) > MOST_RUNS:
        return f"{sum(map(len, held))} layers in {len(held)} stages"
    if not held:
        return "no layers"
    return f"layer{'s' * (sum(map(len, held)) > 1)} {', '.join(map(_range, held))}"


def _range(numbers: range) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"


def _of(part: Part) -> str:
    return f"{part.number + 1} of {part.of}"


# --- frames -------------------------------------------------------------------------------------------------------


def _frames(page: _Page, frames: dict[int, list[Holding]], cells: _Cells) -> None:
    """Nodes with their ranks: up to four cells beside each other in a node, and up to eight on the page."""
    columns = min(4, max(len(held) for held in frames.values()))
    beside = max(1, (8 if sum(map(len, frames.values())) > 8 else 4) // columns)
    wide = columns * (CELL + GAP) + GAP
    for row in range(0, len(frames), beside):
        high = 0.0
        for number, (node, held) in enumerate(list(frames.items())[row : row + beside]):
            x, rows = MARGIN + number * (wide + GAP), -(-len(held) // columns)
            tall = 22 + rows * (cells.height + GAP)
            page.box(x, page.y, wide, tall, "#f7f8fa", "#556")
            page.text(x + GAP, page.y + 15, f"node {node}", 11, bold=True)
            for index, one in enumerate(held):
                down, along = divmod(index, columns)
                cells.draw(page, one, x + GAP + along * (CELL + GAP), page.y + 22 + down * (cells.height + GAP))
            high = max(high, tall)
        page.y += high + GAP


# --- groups -------------------------------------------------------------------------------------------------------


def _exchanges(page: _Page, found: Sequence[Exchange], ranks: Sequence[int], node: int) -> None:
    """A row for each collective: its bytes, and its groups as squares of one color each."""
    page.y += LINE
    said = "collectives per step on each rank: bytes of whole tensors, and the groups"
    page.text(MARGIN, page.y, said, 12, bold=True)
    page.y += 6
    if not found:
        page.y += LINE
        page.text(MARGIN, page.y, "nothing")
    square, nodes = min(SQUARE, MOST_STRIP / len(ranks)), sorted({rank // node for rank in ranks})
    for exchange in found:
        color = _colors([exchange.group[rank] for rank in ranks], GROUPS)
        page.lines.append("<g>")
        page.text(MARGIN, page.y + LINE, f"{exchange.kind.replace('_', '-')} over {exchange.axes}: {_bytes(exchange)}")
        page.text(MARGIN, page.y + 2 * LINE - 1, _group(exchange, node), 10, gray=True)
        for number, rank in enumerate(ranks):
            x = MARGIN + NAMES_WIDTH + number * square + 4 * nodes.index(rank // node)
            page.box(x, page.y + 4, square - 1, SQUARE - 1, color(exchange.group[rank])[1])
            if square == SQUARE and rank < 100:
                page.text(x + 2, page.y + 19, str(rank), 10)
        page.lines.append("</g>")
        page.y += 2 * LINE + 6


def _group(exchange: Exchange, node: int) -> str:
    """`groups of 2, as 0 4, across 2 nodes`."""
    first = [rank for rank, group in enumerate(exchange.group) if group == 0]
    shown = " ".join(map(str, first if len(first) <= 6 else [*first[:4], "...", first[-1]]))
    nodes = len({rank // node for rank in first})
    return f"groups of {len(first)}, as ranks {shown}, " + (f"across {nodes} nodes" if nodes > 1 else "within a node")


def _bytes(exchange: Exchange) -> str:
    least, most = _size(exchange.least), _size(exchange.most)
    return most if least == most else f"{least} to {most}"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} GiB"
