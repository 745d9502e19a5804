"""The study `fabric`: jobs that send less against one that does not, over the bandwidth of the outermost link."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planned import CLUSTER, TOML
from titan.cli import main
from titan.config import load_job
from titan.errors import ConfigError
from titan.planner.report.fabric import GBIT_S, TIME, Fabric, run
from titan.planner.report.steps_ratios import read, steps_ratios
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner

FABRIC = ("--study", "fabric")
SIZES = "[model]\ndim = 512\nffn_dim = 1024\n[train]\nglobal_batch_size = 256\nmicro_batch_size = 32\n"


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A job on two nodes, `together`, and one with a worker on each, `seldom`."""
    folder = tmp_path_factory.mktemp("ways")
    together, seldom = files = [folder / f"{name}.toml" for name in ("together", "seldom")]
    together.write_text(f'base = "{TOML}"\n{SIZES}[mesh]\ndp_shard = 8\n')
    seldom.write_text(f'base = "{together}"\n[mesh]\nworker = 2\ndp_shard = 4\n[plugins.local_steps]\nevery = 16\n')
    return files


def study(ways: list[Path], ratio: float | None = None, *words: str) -> Fabric:
    ratios = {} if ratio is None else {"seldom": ratio}
    return run(ways[0], ways[1:], ratios, words, CLUSTER, None)


def seconds(path: Path, gbit_s: float) -> float:
    """Of a step, with this bandwidth for the four ranks of a node."""
    inner, outer = CLUSTER.links
    job, slower = load_job(path), replace(CLUSTER, links=(inner, replace(outer, bandwidth_gb_s=gbit_s / 8 / 4)))
    return Planner(slower).predict(costs_of(job), job.layout).step_time_s


def test_each_point_is_the_step_at_its_bandwidth_times_the_ratio_of_steps(ways: list[Path]) -> None:
    found = study(ways, 1.25)
    assert found.x_label == "Gbit/s per 4 ranks" and found.series == ("together", "seldom")
    assert [point.x for point in found.points[::2]] == sorted({*GBIT_S, 320})  # the cluster's own, 10 GB/s per rank
    for point in found.points:
        step = seconds(next(path for path in ways if path.stem == point.series), point.x)
        ratio = 1.25 if point.series == "seldom" else 1
        assert point.values["step_time_s"] == pytest.approx(step, rel=1e-9)
        assert point.values[TIME] == pytest.approx(step * ratio, rel=1e-9)


def test_a_way_wins_below_the_bandwidth_at_which_both_take_equally_long(ways: list[Path]) -> None:
    found = study(ways, 1.25)
    least, below = found.wins["seldom"]
    assert least == GBIT_S[0] and 0.2 < below < 320
    assert 1.25 * seconds(ways[1], below) == pytest.approx(seconds(ways[0], below), rel=1e-4)
    assert 1.25 * seconds(ways[1], below / 2) < seconds(ways[0], below / 2)
    last = found.text().splitlines()[-1]
    assert last == f"seldom: faster below {below:.3g} Gbit/s; 1.25 x the steps of together (given)"
    later = study(ways, 1.5).wins["seldom"]
    assert later is not None and later[1] < below


def test_a_way_that_sends_more_wins_above_a_bandwidth(ways: list[Path]) -> None:
    """The same jobs the other way round: where the one begins to win, the other ends."""
    of_seldom, found = study(ways, 1.25).wins["seldom"], run(ways[1], ways[:1], {"together": 0.8}, (), CLUSTER, None)
    assert of_seldom is not None
    above, most = found.wins["together"]
    assert above == pytest.approx(of_seldom[1], rel=1e-4) and most == GBIT_S[-1]
    assert found.text().splitlines()[-1].startswith(f"together: faster above {above:.3g} Gbit/s; 0.8 x the steps")


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (1e6, "seldom: faster at no bandwidth shown; 1e+06 x the steps of together (given)"),
        (1e-6, "seldom: faster at every bandwidth shown; 1e-06 x the steps of together (given)"),
        (None, "1 x the steps of together (not given: measure it and add --steps-ratio seldom=R)"),
    ],
)
def test_what_is_not_given_and_what_never_changes_is_said(ratio: float | None, said: str, ways: list[Path]) -> None:
    assert study(ways, ratio).text().splitlines()[-1].endswith(said)


def test_a_job_alone_is_shown_over_the_bandwidth(ways: list[Path]) -> None:
    alone = run(ways[0], [], {}, (), CLUSTER, None)
    times = [point.values["step_time_s"] for point in alone.points]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    assert "faster" not in alone.text() and "steps ratio" not in alone.text() and not alone.notes


@pytest.mark.parametrize("against", [False, True])
def test_a_job_inside_of_a_node_is_said_to_use_no_outermost_link(against: bool, ways: list[Path]) -> None:
    job = ways[0].with_name("inside.toml")
    job.write_text(f'base = "{ways[0]}"\n[mesh]\ndp_shard = 4\n')
    found = run(job, ways[1:] * against, {}, (), CLUSTER, None)
    times = {point.values["step_time_s"] for point in found.points if point.series == job.stem}
    assert len(times) == 1
    [note] = found.notes
    assert note.startswith(f"{job.stem}: no bandwidth changes its time, because a job of 4 ranks sends nothing over")
    assert note.endswith("outer, which joins groups of 4 ranks") and note == found.text().splitlines()[-1]
    assert found.as_json()["notes"] == [note]


def test_the_command(ways: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config", str(ways[0]), "--study", "fabric", "--against", str(ways[1]), "--cluster", "h100"]
    assert main([*words, "--steps-ratio", "seldom=1.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps_ratio"] == {"together": None, "seldom": 1.5} and found["study"] == "fabric"
    first = {point["series"]: point for point in found["points"][:2]}
    assert first["seldom"][TIME] == pytest.approx(1.5 * first["seldom"]["step_time_s"], rel=1e-9)
    assert bool(found["wins_gbit_s"]["seldom"]) == (first["seldom"][TIME] < first["together"][TIME])
    assert main([*words, "--steps-ratios", str(runs(tmp_path)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main([*words, "--steps-ratios", str(tmp_path / "gone.json")]) == 2
    assert "--steps-ratios: " in (told := capsys.readouterr().err) and "gone.json: No such file" in told


LOSSES = {"together": [9.0, 8, 7, 6, 5, 4], "seldom": [9, 8.5, 8, 7.5, 7, 6.5], "lost": [9, 9, 9, 9, 9, 9]}


def runs(folder: Path, **losses: object) -> Path:
    """A file of runs with these losses, each beside "together"."""
    table = {name: {"baseline": "together", "loss": each} for name, each in {**LOSSES, **losses}.items()}
    (folder / "comm.json").write_text(json.dumps({"runs": table}))
    return folder / "comm.json"


def test_ratios_are_read_from_losses(tmp_path: Path) -> None:
    """6.5 after six steps, and below it after four; 9 after one. What is faster has a ratio below 1."""
    found = read(runs(tmp_path, faster=[9, 6, 3, 2, 2, 2], longer=[9 - 5 / 30 * n for n in range(31)]))
    assert found["together"] == 1 and found["seldom"] == 6 / 4 and found["lost"] == 1 and found["faster"] == 3 / 6
    # Means of three losses: the last is 9 - 5 / 30 * 29, and together's losses reach it with the sixth.
    assert found["longer"] == 5.17  # 31 / 6


def test_losses_are_smoothed(tmp_path: Path) -> None:
    """Means of three: the last is 9 - 0.05 * 28, which the faster run reaches with step 16. One low loss is none."""
    fast, slow = ([9 - fall * step for step in range(30)] for fall in (0.1, 0.05))
    dipped = [loss - 2 * (step == 5) for step, loss in enumerate(slow)]
    found = read(runs(tmp_path, together=fast, slow=slow, dipped=dipped))
    assert found["slow"] == found["dipped"] == 1.88  # 30 / 16


def test_a_run_of_the_file_belongs_to_the_job_of_its_name(tmp_path: Path) -> None:
    file = runs(tmp_path)
    assert steps_ratios([], file, ["seldom", "other"]) == {"seldom": 1.5}
    assert steps_ratios(["seldom=2", "other=seldom"], file, ["seldom", "other"]) == {"seldom": 2, "other": 1.5}
    assert steps_ratios(["other=1.25"], None, ["other"]) == {"other": 1.25}
    none = "has no run named other; say --steps-ratio NAME=RUN with one of its runs: to"
    with pytest.raises(ConfigError, match=none):
        steps_ratios([], file, ["other"])
    misspelt = r"seldon: must be NAME=R .*, or a run of --steps-ratios \(did you mean 'seldom"
    with pytest.raises(ConfigError, match=misspelt):
        steps_ratios(["seldom=seldon"], file, ["seldom"])


OTHER_KINDS = ['"loss": [1]', *(f'"baseline": "a", "loss": [{loss}]' for loss in ("", "NaN", "null"))]


@pytest.mark.parametrize("text", ["{", "[]", *('{"runs": {"a": {' + run + "}}}" for run in OTHER_KINDS)])
def test_a_file_of_another_kind_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json: expected JSON with runs"):
        read(tmp_path / "x.json")


def test_the_file_of_the_bench_is_read() -> None:
    found = read(Path(__file__).parents[2] / "bench" / "results" / "comm.json")
    assert found["all-reduce"] == 1 and found["int8"] == pytest.approx(1, abs=0.05)
    assert 1 < found["local-sgd-4"] < found["local-sgd-16"] < found["randk"]


def test_the_figure_has_a_line_for_each_way(ways: list[Path]) -> None:
    pytest.importorskip("matplotlib")
    from titan.planner.report.plots import study_figure

    [axes] = study_figure(study(ways)).axes
    assert axes.get_yscale() == "log" and axes.get_xscale() == "log"
    assert axes.get_ylabel() == "step time x steps ratio, s"
    assert {"together", "seldom"} <= set(axes.get_legend_handles_labels()[1])


def test_jobs_that_cannot_be_compared_are_refused(ways: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(f'base = "{ways[1]}"\n[train]\nglobal_batch_size = 512\n')
    with pytest.raises(ConfigError, match=r"other has 32,768 tokens per step, and together 16,384; set its train\."):
        run(ways[0], [other], {}, (), CLUSTER, None)
    with pytest.raises(ConfigError, match="two files are named together; rename one"):
        run(ways[0], [ways[0]], {}, (), CLUSTER, None)
    with pytest.raises(ConfigError, match=r"seldon: no file of --against has this name.*seldom"):
        run(ways[0], ways[1:], {"seldon": 2}, (), CLUSTER, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*FABRIC, "--steps-ratio", "seldom"], "--steps-ratio seldom: must be NAME=R with a number above 0"),
        ([*FABRIC, "--steps-ratio", "seldom=-1"], "must be NAME=R with a number above 0"),
        (["--study", "tp", "--against", "other.toml"], "--against: no jobs are compared; add --study fabric"),
        (["--steps-ratios", "comm.json"], "--steps-ratios: no jobs are compared; add --study fabric"),
        (["--steps-ratio", "seldom=2"], "--steps-ratio: no jobs are compared; add --study fabric"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(TOML), *words]) == 2
    assert said in capsys.readouterr().err


def test_the_documentation_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    [(words, shown)] = re.findall(r"^titan (plan .*--study fabric .*)\n```\n\n```\n([^`]*)```", page, re.M)
    assert main(words.split()) == 0
    assert capsys.readouterr().out == shown
