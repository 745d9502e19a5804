"""Published folders: documents are scored and prompts continued as transformers does it, and nothing is lost."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from titan import cli

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from tests.huggingface import converting  # noqa: E402
from tests.published_folders import FOLDERS, TEXT, folder  # noqa: E402

PROMPTS = ["the cat", "a dog ran", " birds; 12", "zwölf", "in the old", "rain", "x", "and 345"]
TEXTS = [TEXT * 2, "the cat", TEXT[7:90], "ü - 東"]


@pytest.fixture(scope="module", params=FOLDERS)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(request.param, tmp_path_factory.mktemp("published"))


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def nats(model: Any, ids: list[int], context: int) -> float:
    """Of all ids but the first, in windows of `context` tokens that overlap by one; the last one is full."""
    total, done, last = 0.0, 0, len(ids) - 1
    while done < last:
        end = min(last, done + context)
        begin = max(0, end - context)
        with torch.no_grad():
            logits = model(torch.tensor([ids[begin:end]])).logits[0].double().log_softmax(-1)
        total -= sum(logits[at - 1 - begin, ids[at]].item() for at in range(done + 1, end + 1))
        done = end
    return total


def read(published: Path) -> tuple[Any, Any]:
    """The model and the tokenizer as transformers reads them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(published).eval()
    return model, transformers.AutoTokenizer.from_pretrained(published)


def test_documents_are_scored_as_by_lm_eval(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """lm-eval 0.4.13: `prefix_token_id` is BOS, else EOS; `tok_encode` adds what the tokenizer adds."""
    model, tokenizer = read(published)
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = ["eval", "--checkpoint", str(published), "--data", "jsonl", "--path", str(tmp_path / "d.jsonl")]
    documents = [tokenizer(text)["input_ids"] for text in TEXTS]
    found = printed(words, capsys)
    expected = sum(nats(model, [start, *ids], 64) for ids in documents)
    assert found["tokens"] == sum(map(len, documents)) and found["lost"] == 0
    assert found["loss"] * found["tokens"] == pytest.approx(expected, rel=1e-5)
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    found = printed([*words, "--no-bos"], capsys)
    expected = sum(nats(model, [tokenizer.eos_token_id, *ids], 64) for ids in plain)
    assert found["loss"] * found["tokens"] == pytest.approx(expected, rel=1e-5)


def test_prompts_are_continued_as_by_transformers(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = read(published)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    words = ["--prompt-file", str(tmp_path / "prompts.txt"), "--temperature", "0", "--max-new-tokens", "40"]
    results = printed(["generate", "--checkpoint", str(published), *words], capsys)["results"]
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    stopped = 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)[0]
        tokens = found[ids.shape[1] :].tolist()
        stopped += tokens[-1] in ends
        assert result["tokens"] == [token for token in tokens if token not in ends], prompt
        assert (result["stopped"] == "end") == (tokens[-1] in ends) and result["prompt_tokens"] == ids.shape[1]
        assert result["text"] == tokenizer.decode(tokens, skip_special_tokens=True) or "\ufffd" in result["text"]
    assert stopped


def content(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_conversion_there_and_back_loses_no_file(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (published / "LICENSE").write_text("free\n")
    direct, kept, back = tmp_path / "direct", tmp_path / "kept", tmp_path / "back"
    for to, form, lost in ((direct, "hf", []), (kept, "titan", ["LICENSE"])):
        assert printed(converting(published, to, form, tokenizer=""), capsys)["not_carried_over"] == lost
    printed(converting(kept, back, tokenizer=""), capsys)
    for made, lost in ((direct, set()), (back, {"LICENSE"})):
        assert content(made).keys() == content(published).keys() - lost
        changed = {name for name, data in content(made).items() if data != content(published)[name]}
        # gpt2's tokenizer_config.json is told its eos, which special_tokens_map.json alone had.
        assert changed <= {"model.safetensors", *(["tokenizer_config.json"] if published.name == "gpt2" else [])}
        before, after = (load_file(path / "model.safetensors") for path in (published, made))
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_weights_that_titan_has_trained_are_used_as_they_were_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts start and end with the end id, which stands in no list of the folder, and an export stops there too."""
    published = folder("llama", tmp_path)
    for name in ("config.json", "generation_config.json"):
        table = json.loads((published / name).read_text())
        (published / name).write_text(json.dumps({**table, "eos_token_id": 2}))
    (tmp_path / "text.txt").write_text(TEXT * 9)
    config = tmp_path / "job.toml"
    config.write_text(JOB.format(folder=tmp_path))
    assert cli.main(["train", "--config", str(config)]) == 0
    words = ["eval", "--data", "text", "--path", str(tmp_path / "text.txt"), "--checkpoint"]
    trained = printed([*words, str(tmp_path / "run")], capsys)
    assert trained["loss"] == printed([*words, str(tmp_path / "run"), "--no-bos"], capsys)["loss"]
    assert trained["loss"] != printed([*words, str(tmp_path / "run"), "--bos"], capsys)["loss"]
    copy, out = tmp_path / "copy", tmp_path / "out"
    printed(converting(tmp_path / "run", copy, "titan", tokenizer=""), capsys)
    assert printed([*words, str(copy)], capsys)["loss"] == trained["loss"]
    printed(converting(copy, out, tokenizer=""), capsys)
    assert transformers.AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == [1, 2]
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [1, 2]


JOB = """
run = {{ name = "run", dir = "{folder}" }}
model = {{ name = "llama", n_layers = 2, dim = 32, n_heads = 4, n_kv_heads = 2, ffn_dim = 64, vocab_size = 300, \
max_seq_len = 64, norm_eps = 1e-6 }}
tokenizer = {{ name = "hf", path = "{folder}/llama" }}
data = {{ name = "text", path = "{folder}/text.txt", seq_len = 32, cache = "{folder}/cache" }}
train = {{ steps = 2, global_batch_size = 2 }}
checkpoint = {{ init_from = "{folder}/llama" }}
"""


def test_another_tokenizer_does_not_come_with_the_files_of_the_former(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    former, other, out = folder("gpt2", tmp_path), folder("neox", tmp_path), tmp_path / "out"
    (former / "vocab.txt").symlink_to(config := tmp_path / "secret")
    (former / "README.md").symlink_to(config)
    config.write_text("not of the folder")
    words = [*converting(former, out, tokenizer=""), "--tokenizer.path", str(other)]
    assert cli.main(words) == 2 and "is not the tokenizer of the weights" in capsys.readouterr().err
    report = printed([*words, "--checkpoint.change_tokenizer", "true"], capsys)
    assert report["not_carried_over"] == ["README.md", "special_tokens_map.json", "vocab.txt"]
    model, tokenizer = read(out)
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 1
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 1


def test_another_end_is_written_wherever_transformers_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published = folder("llama", tmp_path)
    for path in (tmp_path / "both", tmp_path / "config"):
        printed([*converting(published, path, tokenizer=""), "--tokenizer.end", "<|begin|>"], capsys)
        (published / "generation_config.json").unlink(missing_ok=True)
        model, tokenizer = read(path)
        assert tokenizer.eos_token_id == 0 and 0 in model.generation_config.eos_token_id
        assert json.loads((path / "config.json").read_text())["eos_token_id"] == [0, 1, 2]
