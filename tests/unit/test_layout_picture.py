"""Pictures of layouts (`titan plan --draw`): what cells say, which ranks form groups, and the pictures of the docs."""

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

from tests.planned import CLUSTER, job_of
from titan.cli import main
from titan.config import load_job
from titan.contracts.base.layout import Axis, Layout
from titan.contracts.base.mesh import Mesh
from titan.planner.dryrun.run import alone_as
from titan.planner.machine import cluster
from titan.planner.picture.draw import MOST_CELLS, draw_layout, layout_picture
from titan.planner.picture.holdings import exchanges, groups, holdings
from titan.planner.picture.traffic import Among, moved, passed_on
from titan.planner.step.layout import costs_of

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "parallelism"
STACKED = ROOT / "tests" / "configs" / "stacked.toml"
SVG = "{http://www.w3.org/2000/svg}"
MOE = ("--model.name", "moe", "--model.preset", "moe-tiny", "--model.vocab_size", "2048")


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def cells(svg: str) -> dict[int, list[str]]:
    """Lines of each rank's cell that say something."""
    marked = {node.get("id", ""): node for node in ElementTree.fromstring(svg).iter(f"{SVG}g") if node.get("id")}
    said = {name: [text.text for text in node.iter(f"{SVG}text") if text.text] for name, node in marked.items()}
    return {int(name.removeprefix("rank-")): lines for name, lines in said.items()}


def fills(svg: str, rank: int) -> list[tuple[str, float, float, float, float]]:
    """(color, x, y, width, height) of the boxes in a cell, relative to the cell."""
    (cell,) = (node for node in ElementTree.fromstring(svg).iter(f"{SVG}g") if node.get("id") == f"rank-{rank}")
    frame, *boxes = cell.iter(f"{SVG}rect")
    x, y = (float(frame.get(key, "")) for key in ("x", "y"))
    at = [[float(box.get(key, "")) for key in ("x", "y", "width", "height")] for box in boxes]
    return [(str(box.get("fill")), a - x, b - y, c, d) for box, (a, b, c, d) in zip(boxes, at, strict=True)]


WHOLE, POSITIONS = ["layers 0-3", "with embeddings and head"], "all 16 positions"
SLICED, PIPED = "--mesh.tp 2 --mesh.dp_shard 1", "--mesh.pp 2 --mesh.dp_shard 1 --plugins.pipeline"
EXPERTS = f"{' '.join(MOE)} --model.n_experts 8 --mesh.dp_shard 4 --mesh.ep 2"


@pytest.mark.parametrize(
    ("words", "rank", "said"),
    [
        ("--mesh.dp_replicate 4 --mesh.dp_shard 1", 3, [*WHOLE, "samples 6-7 of 8", POSITIONS]),
        ("--mesh.dp_shard 4", 1, [*WHOLE, "keeps shard 2 of 4", "samples 2-3 of 8", POSITIONS]),
        (
            SLICED,
            1,
            [*WHOLE, "slice 2 of 2 of matrices (tp)", "samples 0-7 of 8", POSITIONS, "hidden states: 8 positions"],
        ),
        (
            f"{SLICED} --plugins.tensor.sequence_parallel false",
            0,
            [*WHOLE, "slice 1 of 2 of matrices (tp)", "samples 0-7 of 8", POSITIONS],
        ),
        (f'{PIPED}.split_points=["layers.3"]', 1, ["layer 3", "with head", "samples 0-7 of 8", POSITIONS]),
        (
            f'{PIPED}.schedule Interleaved1F1B --plugins.pipeline.split_points=["layers.1","layers.2","layers.3"]',
            0,
            ["layers 0, 2", "with embeddings", "samples 0-7 of 8", POSITIONS],
        ),
        (
            "--mesh.cp 2 --mesh.dp_shard 2",
            3,
            [*WHOLE, "keeps shard 4 of 4", "samples 4-7 of 8", "8 positions, part 2 of 2"],
        ),
        (
            "--mesh.worker 2 --mesh.dp_shard 2",
            2,
            [*WHOLE, "own weights, 2 of 2 (worker)", "keeps shard 1 of 2", "samples 4-5 of 8", POSITIONS],
        ),
        (
            EXPERTS,
            2,
            [
                *WHOLE,
                "keeps shard 3 of 4",
                "stack elements 0-3 of 8 (ep)",
                "keeps shard 2 of 2",
                "samples 4-5 of 8",
                POSITIONS,
            ],
        ),
    ],
)
def test_a_cell_says_what_the_rank_holds(words: str, rank: int, said: list[str]) -> None:
    job = job_of(*shlex.split(words), "--train.global_batch_size", "8", "--data.seq_len", "16")
    drawn = cells(layout_picture(job, CLUSTER))
    assert list(drawn) == list(range(job.layout.world_size))
    assert drawn[rank] == [f"rank {rank}", *said]


def test_boxes_lie_where_the_parts_are() -> None:
    """tp 2 x dp_shard 2: the second rank's slice is the lower half, of which the second shard is kept."""
    svg = layout_picture(job_of("--mesh.tp", "2", "--mesh.dp_shard", "2"), CLUSTER)
    whole, used, kept, batch, tokens, hidden = fills(svg, 3)
    assert used[1:] == pytest.approx((whole[1], whole[2] + whole[4] / 2, whole[3], whole[4] / 2))
    assert kept[1:] == pytest.approx((whole[1], whole[2] + whole[4] * 3 / 4, whole[3], whole[4] / 4))
    assert tokens[1:] == pytest.approx((batch[1], batch[2] + batch[4] / 2, batch[3], batch[4] / 2))
    assert hidden[1:] == pytest.approx((batch[1] + batch[3] / 2, tokens[2], batch[3] / 2, tokens[4]))


def test_the_same_content_has_the_same_color_and_a_picture_is_the_same_each_time(tmp_path: Path) -> None:
    job = job_of("--mesh.tp", "2", "--mesh.dp_shard", "2")
    svg = layout_picture(job, CLUSTER)
    weights, batch = ([fills(svg, rank)[box][0] for rank in range(4)] for box in (1, 4))
    assert weights[0] == weights[2] != weights[1] == weights[3]
    assert batch[0] == batch[1] != batch[2] == batch[3]
    for name in ("new/a.svg", "new/b.svg"):
        draw_layout(job, CLUSTER, tmp_path / name)
    assert (tmp_path / "new" / "a.svg").read_bytes() == (tmp_path / "new" / "b.svg").read_bytes()


def test_an_axis_from_outside_is_drawn_by_its_facts() -> None:
    words = ["--plugins.path", str(ROOT / "tests" / "guests"), "--data.path", "nowhere", "--mesh.spread", "2"]
    job = load_job(STACKED, [*words, "--mesh.dp_shard", "4"])
    svg = layout_picture(job, CLUSTER)
    assert "spread 2: ranks that share stacks" in texts(svg)
    shown = [next(line for line in lines if "(spread)" in line) for lines in cells(svg).values()]
    assert shown == ["stack elements 1 of 2 (spread)", "stack elements 2 of 2 (spread)"] * 2


def test_two_thousand_ranks_are_summarized() -> None:
    job = load_job(ROOT / "configs" / "llama65b.toml", [])
    assert job.layout.world_size == 2048 > MOST_CELLS
    svg = layout_picture(job, cluster.load("a100-80gb"))
    assert list(cells(svg)) == [*range(8), *range(2040, 2048)] and len(svg) < 50_000
    said = texts(svg)
    assert "drawn: the first and the last 8 of 2,048 ranks" in said and "node 255" in said
    assert "groups of 128, as ranks 0 2 4 6 ... 254, across 32 nodes" in said


def test_groups_are_those_of_the_mesh() -> None:
    """Every process group of a real mesh, on three of its ranks, with an axis that folds two others."""
    axes = (
        Axis(name="pp", data="same", weights="layers", topology_order=0, doc=""),
        Axis(name="dp_shard", data="dealt", weights="copies", topology_order=20, doc=""),
        Axis(name="cp", data="sliced", weights="copies", topology_order=30, doc=""),
        Axis(name="ep", weights="slices", folds=("dp_shard", "cp"), topology_order=35, doc=""),
        Axis(name="tp", data="same", weights="slices", topology_order=40, doc=""),
    )
    layout = Layout(axes, {"pp": 2, "dp_shard": 2, "cp": 2, "ep": 2, "tp": 2})
    of_name = {
        "pp": Among(("pp",)),
        "dp_shard": Among(("dp_shard",)),
        "cp": Among(("cp",)),
        "tp": Among(("tp",)),
        "ep": Among(("ep",)),
        "dp_shard x cp": Among(("dp_shard", "cp")),
        "dp_shard x cp / ep": Among(("dp_shard", "cp"), ("ep",)),
    }
    for rank in (0, 6, 15):
        with alone_as(rank, layout.world_size):
            mesh = Mesh(layout, torch.device("cpu"), rank)
            mesh.flat(("dp_shard", "cp"))
            members = {name: dist.get_process_group_ranks(group) for name, group in mesh.groups()}
        assert set(members) == set(of_name)
        for name, among in of_name.items():
            numbers = groups(layout, among)
            assert [one for one, number in enumerate(numbers) if number == numbers[rank]] == members[name], name


JOBS = {
    "sharded": ("--mesh.dp_shard", "4"),
    "piped": ("--mesh.pp", "2", "--mesh.tp", "2", "--mesh.dp_shard", "2"),
    "experts": (*MOE, "--mesh.dp_shard", "4", "--mesh.ep", "2"),
}


@pytest.mark.parametrize("words", JOBS.values(), ids=JOBS)
def test_every_exchange_of_the_planner_is_drawn(words: tuple[str, ...]) -> None:
    job = job_of(*words, "--train.global_batch_size", "16")
    costs, layout = costs_of(job), job.layout
    found = {(one.kind, one.axes): (one.least, one.most) for one in exchanges(layout, costs)}
    places = range(layout.degree_of("layers"))
    of_places = [moved(place, costs, layout) for place in places]
    for place, planned in zip(places, of_places, strict=True):
        for (kind, axes), size in planned.items():
            least, most = found[kind, " x ".join(axes)]
            assert least <= size <= most, (place, kind, axes)
    if len(places) > 1:
        sent = [passed_on(place, costs, layout) for place in places]
        assert found.pop(("send", "pp")) == (min(sent), max(sent))
    assert set(found) == {(kind, " x ".join(axes)) for planned in of_places for kind, axes in planned}
    said = " ".join(texts(layout_picture(job, CLUSTER)))
    for kind, axes in found:
        assert f"{kind.replace('_', '-')} over {axes}: " in said


def test_a_rank_sees_every_sample_and_position_once() -> None:
    job = job_of("--mesh.dp_shard", "2", "--mesh.dp_replicate", "2", "--mesh.cp", "2", "--mesh.tp", "2")
    held = list(holdings(job.layout, costs_of(job), range(16)))
    seen = [(one.samples.number, one.positions.number, one.sliced.number) for one in held]
    assert len(set(seen)) == 16 and {one.samples.of for one in held} == {4}
    assert all(one.samples.number == job.layout.index_of(one.rank, "dealt") for one in held)


def drawing_commands() -> list[tuple[str, list[str]]]:
    """(picture, words of the command) for each `titan plan ... --draw PICTURE` of the pages."""
    lines = [line for page in sorted(PAGES.glob("*.md")) for line in page.read_text().splitlines()]
    words = [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"titan plan .*--draw", line)]
    return [(one[one.index("--draw") + 1], one) for one in words]


def test_every_picture_of_the_docs_has_its_command() -> None:
    drawn, shown = [picture for picture, _ in drawing_commands()], set[str]()
    for page in PAGES.glob("*.md"):
        shown |= set(re.findall(r"!\[[^\]]+\]\((\w+\.svg)\)", page.read_text()))
    assert {file.name for file in PAGES.glob("*.svg")} == shown == set(drawn)
    assert len(drawn) == len(shown) >= 7


@pytest.mark.parametrize(("picture", "words"), drawing_commands(), ids=lambda value: value if "." in value else "")
def test_the_pictures_of_the_docs_are_what_the_command_draws(
    picture: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([str(tmp_path / word) if word == picture else word for word in words]) == 0
    assert (PAGES / picture).read_text() == (tmp_path / picture).read_text(), "draw it again, by the page's command"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--draw a.png", "--draw: a.png: the suffix must be .svg"),
        ("--draw folder.svg", "folder.svg: cannot be written: Is a directory"),
        ("--draw a.svg --dry-run", "--draw: only one predicted job is drawn"),
        ("--draw a.svg --study tp", "--draw: only one predicted job is drawn"),
    ],
)
def test_what_is_not_drawn(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.svg").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--config", str(ROOT / "configs" / "debug.toml"), *words.split()]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "a.svg").exists()
