"""`titan generate` and the sample at the end of training: the same text at any layout."""

import json
import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.commands import run_titan
from tests.jobs import LLAMA, mesh
from tests.sweeps import but_sweep
from titan.inference.generation import Sampling
from titan.testing.jobs import train_job, trained
from titan.testing.ranks import run_ranks

PROMPTS = ["the model", "a", "its loss falls", ""]
SAMPLINGS = [Sampling(max_new_tokens=12, temperature=0.0), Sampling(max_new_tokens=12, temperature=1.0, top_k=50)]
WIDE = ("--model.init_std", "0.2")
"""Makes a model that has seen no text to speak of prefer some tokens, other ones after each."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    train_job(folder, 1, "--train.steps", "2", "--checkpoint.enabled", "true", *WIDE)
    return str(folder / "run")


# --- layouts ------------------------------------------------------------------------------------------------------


def _texts(checkpoint: str, words: list[str]) -> list[list[int]]:
    """On one rank: greedy and drawn continuations of all prompts."""
    from titan.inference import generation
    from titan.inference.load_model import open_job, open_trained
    from titan.ranks import process
    from titan.ranks.meeting.launch_env import launched_world_size

    path, job = open_job(checkpoint, words, launched_world_size())
    opened = open_trained(path, job, process.join(job))
    prompts = [generation.encode(job, prompt, job.tokenizer.delimiters) for prompt in PROMPTS]
    texts = [generation.generate(opened.context, opened.engine, prompts, sampling) for sampling in SAMPLINGS]
    return [text.tokens for some in texts for text in some]


@pytest.fixture(scope="module")
def one_process(checkpoint: str) -> list[list[int]]:
    """What one process generates."""
    [texts] = run_ranks(_texts, 1, checkpoint, [], init=False)
    assert len({tuple(tokens) for tokens in texts}) == 8 and len({token for tokens in texts for token in tokens}) > 30
    return texts


LAYOUTS = {
    "tp 2": (2, mesh(tp=2)),
    "tp 2, whole sequences": (2, [*mesh(tp=2), "--plugins.tensor.sequence_parallel", "false"]),
    "tp 2, whole logits": (2, [*mesh(tp=2), "--plugins.tensor.loss_parallel", "false"]),
    "dp_shard 2": (2, []),
    "dp_shard 2, gathered per use": (2, ["--plugins.fsdp.zero_stage", "3"]),
    "cp 2, ring": (2, mesh(cp=2)),
    "cp 2, ulysses, tp 2": (4, [*mesh(cp=2, tp=2), "--plugins.context.method", "ulysses"]),
    "cp 2, gather, pp 2": (4, [*mesh(cp=2, pp=2), "--plugins.context.method", "gather"]),
    "pp 2": (2, mesh(pp=2)),
    "pp 2 x tp 2": (4, mesh(pp=2, tp=2)),
}
SWEPT = ("tp 2, whole sequences", "tp 2, whole logits", "dp_shard 2", "cp 2, ulysses, tp 2", "pp 2 x tp 2")


@pytest.mark.parametrize("layout", but_sweep(LAYOUTS, *SWEPT))
def test_the_text_is_that_of_one_process(layout: str, checkpoint: str, one_process: list[list[int]]) -> None:
    ranks, words = LAYOUTS[layout]
    assert run_ranks(_texts, ranks, checkpoint, words, init=False) == [one_process] * ranks


def test_ranks_that_would_draw_differently_take_the_first_ones_token(
    checkpoint: str, one_process: list[list[int]]
) -> None:
    for texts in run_ranks(_texts_of_a_rank_apart, 2, checkpoint, init=False):
        assert texts == one_process


def _texts_of_a_rank_apart(checkpoint: str) -> list[list[int]]:
    import torch

    from titan.inference import generation

    if os.environ["RANK"] == "1":
        draw, argmax = generation.Text.draw, torch.Tensor.argmax
        generation.Text.draw = lambda self, row: (draw(self, row) + 1) % 256  # type: ignore[method-assign]
        # Of logits; along dimension 1, positions are looked up.
        torch.Tensor.argmax = lambda self, dim: (argmax(self, dim) + (dim == -1)) % 256  # type: ignore
    return _texts(checkpoint, [])


# --- the end of training ------------------------------------------------------------------------------------------


def _sample(folder: str, words: list[str]) -> str:
    """On one rank: train a step, then sample."""
    from titan.inference import generation

    run = trained(folder, words, str(LLAMA))
    return generation.sample(run.context, run.engine, "the model trains", run.job.run.seed)


def test_the_sample_of_training_is_the_same_at_any_layout(checkpoint: str) -> None:
    folder = str(Path(checkpoint).parent)
    words = ["--train.steps", "1", "--data.path", f"{folder}/text", *WIDE]
    [expected] = run_ranks(_sample, 1, folder, words, init=False)
    assert len(set(expected)) > 3
    for layout in (mesh(pp=2), [*mesh(tp=2), "--plugins.activation_checkpoint.mode", "full"]):
        assert run_ranks(_sample, 2, folder, [*words, *layout], init=False) == [expected] * 2, layout


# --- the command --------------------------------------------------------------------------------------------------


def command(*words: str, ranks: int = 1, typed: str = "") -> CompletedProcess[str]:
    return run_titan(["generate", *words, "--run.device", "cpu"], Path.cwd(), {"NPROC": str(ranks)}, typed=typed)


def test_json_has_the_first_text_and_all_results(checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("the model\n\nits loss\n")
    asked = ("--prompt-file", str(tmp_path / "prompts"), "--samples", "2", "--json", "--max-new-tokens", "25")
    done = command("--checkpoint", checkpoint, *asked, "--temperature", "1", "--seed", "5")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert {"text", "tokens", "prompt", "prompt_tokens", "stopped", "results"} == said.keys()
    assert [result["prompt"] for result in said["results"]] == ["the model"] * 2 + ["its loss"] * 2
    assert said["results"][0] == {key: value for key, value in said.items() if key != "results"}
    assert len({result["text"] for result in said["results"]}) == 4
    for result in said["results"]:
        assert bytes(token for token in result["tokens"]).decode(errors="replace") == result["text"]
        room = 32 - result["prompt_tokens"]
        assert (len(result["tokens"]), result["stopped"]) in {(room, "max_seq_len"), (25, "max_new_tokens")}
    assert f"{sum(len(result['tokens']) for result in said['results'])} tokens in " in done.stderr
    assert "stopped at the model's max_seq_len, 32 tokens" in done.stderr


def test_what_is_streamed_is_the_text(checkpoint: str) -> None:
    words = ("--checkpoint", checkpoint, "--prompt", "größer", "--max-new-tokens", "20", "--temperature", "1.5")
    text = json.loads(command(*words, "--json").stdout)["text"].replace("\r", "\n")  # as stdout is read
    assert "\N{REPLACEMENT CHARACTER}" in text, "no broken character to hold back; take another seed"
    streamed = command(*words)
    assert (streamed.returncode, streamed.stdout) == (0, f"größer{text}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--checkpoint", "nowhere", "--prompt", "a"], "--checkpoint = 'nowhere': no such folder"),
        (["--prompt", "x" * 32], "has 32 tokens; prompt and generated text together may have max_seq_len = 32"),
        (["--prompt", "x", "--top-p", "1.5", "--samples", "0"], "--top-p 1.5: must be at most 1"),
        (["--prompt", "x", "--top-p", "1.5", "--samples", "0"], "--samples 0: must be at least 1"),
        (["--prompt", "--x " * 8], "has 32 tokens"),
        (["--prompt-file", "nowhere"], "--prompt-file nowhere: cannot be read"),
        (["--prompt-file", os.devnull], "holds no prompt"),
        (["--prompt", "x", "--mesh.tp", "2"], "tp 2 = 2 ranks, but there are 1"),
    ],
)
def test_wrong_input_is_one_sentence(words: list[str], said: str, checkpoint: str) -> None:
    done = command("--checkpoint", checkpoint, *words)
    assert (done.returncode, done.stdout) == (2, "") and said in done.stderr


def test_nproc_starts_ranks_and_stdin_is_a_prompt(checkpoint: str, one_process: list[list[int]]) -> None:
    words = ["--checkpoint", checkpoint, "--prompt", "-", "--max-new-tokens", "12", "--temperature", "0", "--json"]
    done = command(*words, *mesh(tp=2), ranks=2, typed=PROMPTS[0])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == one_process[0]
