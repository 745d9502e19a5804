"""A changed TOML on resume: free, said with both values, or refused with both values; never ignored."""

import functools
import json
import operator
from pathlib import Path
from typing import Any

import pytest

from bench import mutations
from titan.config import load_job
from titan.config.changes import Changes, compare
from titan.config.tables import differences
from titan.errors import CheckpointError, ConfigError
from titan.weights.load import stored_rest

QUICK = Path(__file__).parents[2] / "configs" / "quickstart.toml"
TEST_PLUGINS = Path(__file__).parents[1] / "plugins"


INJECTED = ("--plugins.path", str(TEST_PLUGINS), "--plugins.inject_nan.steps", "3")


def table(*words: str) -> dict[str, Any]:
    return dict(load_job(QUICK, [*INJECTED, *words], 1).table)


def saved(fingerprint: str = "f", **more: Any) -> dict[str, Any]:
    return {"config": table(), "data": {"samples": 24, "fingerprint": fingerprint}, **more}


def test_what_changes_no_curve_is_free() -> None:
    layout = ("--mesh.dp_shard", "1", "--train.micro_batch_size", "4", "--plugins.activation_checkpoint.mode", "full")
    run = ("--run.name", "other", "--data.workers", "2", "--checkpoint.every", "3", "--metrics.every", "1")
    same_samples = ("--run.seed", "3", "--checkpoint.reset_data", "true")
    assert compare(saved(), table(*layout, *run, *same_samples), "f") == Changes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--optimizer.lr", "1e-3"), "optimizer.lr = 0.001, the checkpoint has 0.004: takes effect at the next step"),
        (("--train.steps", "480"), "train.steps = 480, the checkpoint has 240: the run now ends at that step; a"),
        (("--train.global_batch_size", "48"), "train.global_batch_size = 48, the checkpoint has 24: the next step"),
        (("--train.grad_clip", "0"), "train.grad_clip = 0.0, the checkpoint has 1.0"),
        (("--plugins.bf16.enabled", "true"), "plugins.bf16 = on, the checkpoint has unset"),
    ],
)
def test_what_takes_effect_is_said(words: tuple[str, ...], said: str) -> None:
    changes = compare(saved(), table(*words), "f")
    assert [sentence[: len(said)] for sentence in changes.said] == [said] and not changes.other_samples


def test_what_only_new_runs_read_is_not_said_to_take_effect() -> None:
    on = ("--plugins.fp16.enabled", "true")
    (said,) = compare(saved(config=table(*on)), table(*on, "--plugins.fp16.init_scale", "256"), "f").said
    assert said.startswith("plugins.fp16.init_scale = 256.0, the checkpoint has 65536.0: sets what a new run begins")


def test_changes_that_explain_another_state_of_the_optimizer() -> None:
    words = ("--optimizer.name", "lion", "--optimizer.lr", "1e-3", "--plugins.bf16.pure", "true", "--train.steps", "9")
    now = table(*words)
    assert compare(saved(), now, "f").updates == (
        "optimizer.name = 'lion', the checkpoint has 'adamw'",
        "plugins.bf16 = on, the checkpoint has unset",
    )
    (lr,) = compare(saved(), table("--optimizer.lr", "1e-3"), "f").updates
    assert lr == "optimizer.lr = 0.001, the checkpoint has 0.004"


def test_another_model_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        compare(saved(), table("--model.dim", "64", "--model.norm_eps", "1e-6"), "f")
    why = "the checkpoint is of another model; restore the old value, or set another --run.name"
    assert [str(fault) for fault in error.value.faults] == [
        f"model.dim = 64, the checkpoint has 128: {why}",
        f"model.norm_eps = 1e-06, the checkpoint has 1e-05: {why}",
    ]


def test_other_samples_are_refused_or_begun_anew() -> None:
    now = table("--data.seq_len", "64", "--optimizer.lr", "1e-3")
    with pytest.raises(
        ConfigError, match=r"data.seq_len = 64, the checkpoint has 128\); set checkpoint.reset_data = t"
    ):
        compare(saved(), now, "g")
    with pytest.raises(ConfigError, match="files of the datasets changed"):
        compare(saved(), table("--data.workers", "3", "--data.cache", "/elsewhere"), "g")
    changes = compare(saved(), {**now, "checkpoint": {**now["checkpoint"], "reset_data": True}}, "g")
    rate, samples = changes.said
    assert changes.other_samples and samples.endswith("the data restarts at its first sample")
    assert rate.startswith("optimizer.lr = 0.001")


def test_another_tokenizer_is_refused_or_said() -> None:
    now = table("--checkpoint.change_tokenizer", "true", "--checkpoint.reset_data", "true")
    with pytest.raises(ConfigError, match=r"\(the tokenizer changed\); set checkpoint.reset_data = true.*\nit is B"):
        compare(saved(), table(), "g", "it is B")
    assert compare(saved(), now, "g", "it is B").said[0] == "it is B"


def test_lists_are_compared_entry_by_entry() -> None:
    one, other = [{"name": "text", "weight": 1.0}], [{"name": "text", "weight": 2.0}]
    assert list(differences({"mixture": one}, {"mixture": other})) == [("mixture.0.weight", 1.0, 2.0)]
    assert list(differences({"mixture": one}, {"mixture": one + other})) == [("mixture", one, one + other)]
    assert list(differences({"betas": [1, 2]}, {"betas": (1, 2)})) == []


SECTIONS = ("validation", "comm", "metrics", "loss", "mesh")
KEYS = ("train.non_finite", "data.packing", "optimizer.betas", "model.norm_eps", "checkpoint.async")
OF_A_TECHNIQUE = "plugins.inject_nan.rank"


def lacking(*path: str) -> dict[str, Any]:
    """What a version without this section or key has saved of the same job."""
    found = saved()
    *above, last = path
    del functools.reduce(operator.getitem, above, found["config"])[last]
    return found


@pytest.mark.parametrize("path", [*SECTIONS, *KEYS, OF_A_TECHNIQUE])
def test_what_the_version_that_saved_did_not_know_is_no_change_while_it_is_the_default(path: str) -> None:
    assert compare(lacking(*path.split(".")), table(), "f") == Changes()


def test_what_the_version_that_saved_did_not_know_is_said_where_it_is_not_the_default() -> None:
    (said,) = compare(lacking("loss"), table("--loss.z_loss", "1e-4", "--validation.every", "5"), "f").said
    assert said.startswith("loss.z_loss = 0.0001, the checkpoint has 0.0")
    (said,) = compare(lacking(*OF_A_TECHNIQUE.split(".")), table(f"--{OF_A_TECHNIQUE}", "2"), "f").said
    assert said.startswith("plugins.inject_nan.rank = 2, the checkpoint has 0")
    with pytest.raises(ConfigError, match=r"^model\.norm_eps = 1e-06, the checkpoint has 1e-05"):
        compare(lacking("model", "norm_eps"), table("--model.norm_eps", "1e-6"), "f")


def test_sections_that_are_known_no_longer_are_said() -> None:
    old = saved()
    old["config"] |= {"annealing": {"rate": 3, "deep": {"er": 1}}, "odd": 3}
    assert [sentence.partition(":")[0] for sentence in compare(old, table(), "f").said] == [
        "annealing.rate = unset, the checkpoint has 3",
        "annealing.deep = unset, the checkpoint has on",
        "odd = unset, the checkpoint has 3",
    ]


@pytest.mark.parametrize("config", [{}, {"model": {"name": "gone"}, "data": {"mixture": 3}, "plugins": {"gone": {}}}])
def test_a_config_of_another_world_is_compared_all_the_same(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the checkpoint is of another model"):
        compare({"config": config}, table(), "f")


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ({"dropped": 1.5}, "dropped in rest that is not of type int"),
        ({"valid_tokens": "1"}, "valid_tokens in rest that is not of type int"),
        ({"tokenizer": []}, "tokenizer in rest that is not of type dict"),
        ({"step": 0}, "does not hold the config of the run"),
        ({"config": {"data": ["x"]}}, "does not hold the config of the run"),
    ],
)
def test_a_state_of_other_kinds_is_refused(rest: Any, said: str, tmp_path: Path) -> None:
    path = mutations.save(tmp_path)
    assert stored_rest(path)["step"] == 2  # without the keys of the first three
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "rest": rest}))
    with pytest.raises(CheckpointError, match=f"{said}; use another checkpoint, a copy of this one, or the version"):
        stored_rest(path)
