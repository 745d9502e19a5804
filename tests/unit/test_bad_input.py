"""Wrong input never reaches a stack trace: exit code 2, and one line per fault that names the place and what would fit.

Each case spoils a good job in one way (or several); every line it must print is given by a piece of it.
"""

from pathlib import Path

import pytest

from titan import cli
from titan.errors import EXIT_WRONG_INPUT
from titan.testing.jobs import write_text

GOOD = """
[model]
name = "llama"
n_layers = 4
dim = 32
n_heads = 4
n_kv_heads = 2
ffn_dim = 48
vocab_size = 257
max_seq_len = 32

[tokenizer]
name = "byte"

[data]
name = "text"
path = "TEXT"
seq_len = 16
cache = "CACHE"

[train]
steps = 2
global_batch_size = 8

[mesh]

[optimizer]
name = "adamw"
lr = 3e-3

[plugins]
"""

# (what is replaced, by what, pieces of the lines expected: one line each)
CASES: dict[str, tuple[str, str, list[str]]] = {
    # unknown keys and tables
    "unknown table": ("[mesh]", "[mehs]", ["[mehs]: unknown table (did you mean 'mesh'?)"]),
    "unknown model key": ("dim = 32", "dimm = 32\ndim = 32", ["[model] dimm: unknown key (did you mean 'dim'?)"]),
    "unknown train key": ("steps = 2", "steps = 2\nstep = 3", ["[train] step: unknown key (did you mean 'steps'?)"]),
    "unknown data key": ("seq_len = 16", "seq_len = 16\nseqlen = 3", ["[data] seqlen: unknown key"]),
    "unknown optimizer key": ("lr = 3e-3", "lr = 3e-3\nbeta = 1", ["[optimizer] beta: unknown key (did you mean 'betas'?)"]),
    "unknown axis": ("[mesh]", "[mesh]\ntpp = 1", ["[mesh] tpp: no plugin owns this axis (did you mean 'tp'?)"]),
    "unknown technique": ("[plugins]", "[plugins.fsddp]", ["[plugins] fsddp: unknown technique (did you mean 'fsdp'?)"]),
    "unknown technique key": ("[plugins]", "[plugins.fsdp]\nzero = 1", ["[plugins.fsdp] zero: unknown key"]),
    "unknown run key": ("[mesh]", '[run]\nnmae = "x"\n[mesh]', ["[run] nmae: unknown key (did you mean 'name'?)"]),
    "unknown metrics key": ("[mesh]", "[metrics]\nevry = 1\n[mesh]", ["[metrics] evry: unknown key"]),
    "unknown tracker key": ("[mesh]", "[metrics.jsonl]\nx = 1\n[mesh]", ["[metrics.jsonl] x: unknown key"]),
    "unknown checkpoint key": ("[mesh]", "[checkpoint]\nkeeep = 1\n[mesh]", ["[checkpoint] keeep: unknown key"]),
    "unknown comm key": ("[mesh]", "[comm]\ntimeout = 1\n[mesh]", ["[comm] timeout: unknown key"]),
    "key outside of a table": ("[model]", "steps = 3\n[model]", ["[steps]: unknown table"]),
    # names
    "unknown model": ('name = "llama"', 'name = "lama"', ["[model] name = 'lama': unknown model (did you mean 'llama'?)"]),
    "unknown preset": ('name = "llama"', 'name = "llama"\npreset = "66b"', ["[model] preset = '66b': unknown preset"]),
    "unknown tokenizer": ('name = "byte"', 'name = "bite"', ["[tokenizer] name = 'bite': unknown tokenizer"]),
    "unknown dataset": ('name = "text"', 'name = "txt"', ["[data] name = 'txt': unknown dataset (did you mean 'text'?)"]),
    "unknown optimizer": ('name = "adamw"', 'name = "adam"', ["[optimizer] name = 'adam': unknown optimizer"]),
    "unknown schedule": ("[mesh]", '[lr_schedule]\nname = "cos"\n[mesh]', ["[lr_schedule] name = 'cos': unknown lr_schedule"]),
    "unknown loss": ("[mesh]", '[loss]\nname = "mse"\n[mesh]', ["[loss] name = 'mse': unknown loss"]),
    "name of the wrong type": ('name = "llama"', "name = 3", ["[model] name = '3': unknown model"]),
    "no model": ('name = "llama"', "", ["[model] name: missing; name a model"]),
    # types
    "text for a number": ("steps = 2", 'steps = "2"', ["[train] steps = '2': must be an integer"]),
    "fraction for a count": ("steps = 2", "steps = 2.5", ["[train] steps = 2.5: must be an integer"]),
    "flag for a number": ("lr = 3e-3", "lr = true", ["[optimizer] lr = True: must be a number"]),
    "number for a flag": ("seq_len = 16", "seq_len = 16\nshuffle = 1", ["[data] shuffle = 1: must be true or false"]),
    "number for a text": ("[mesh]", "[run]\nname = 3\n[mesh]", ["[run] name = 3: must be a string"]),
    "list for a number": ("dim = 32", "dim = [32]", ["[model] dim = [32]: must be an integer"]),
    "number for a list": ("lr = 3e-3", "lr = 3e-3\nbetas = 0.9", ["[optimizer] betas = 0.9: must be a list"]),
    "list too short": ("lr = 3e-3", "lr = 3e-3\nbetas = [0.9]", ["[optimizer] betas = [0.9]: must be a list of 2"]),
    "value for a technique": ("[plugins]", "[plugins]\nfsdp = 1", ["[plugins] fsdp: must be a table, [plugins.fsdp]"]),
    "degree that is no number": ("[mesh]", '[mesh]\ntp = "two"', ["[mesh] tp = 'two': must be an integer"]),
    "enabled that is no flag": ("[plugins]", '[plugins.bf16]\nenabled = "no"', ["[plugins.bf16] enabled = 'no': must be true or false"]),
    # values
    "negative rate": ("lr = 3e-3", "lr = -1.0", ["[optimizer] lr = -1.0: must be"]),
    "not a number": ("lr = 3e-3", "lr = nan", ["[optimizer] lr = nan: must be a finite number"]),
    "infinite rate": ("lr = 3e-3", "lr = inf", ["[optimizer] lr = inf: must be a finite number"]),
    "no steps": ("steps = 2", "steps = 0", ["[train] steps = 0: must be at least 1"]),
    "beta of one": ("lr = 3e-3", "lr = 3e-3\nbetas = [0.9, 1.0]", ["[optimizer] betas = [0.9, 1.0]: must be below 1"]),
    "one of": ("seq_len = 16", 'seq_len = 16\npacking = "tight"', ["[data] packing = 'tight': must be one of 'concat', 'document_mask', 'pad'"]),
    "one of, near": ("[plugins]", '[plugins.activation_checkpoint]\nmode = "ful"', ["must be one of 'full', 'every_n', 'selective', 'attention', 'budget', 'auto', 'none' (did you mean 'full'?)"]),
    "zero stage 4": ("[plugins]", "[plugins.fsdp]\nzero_stage = 4", ["[plugins.fsdp] zero_stage = 4: must be one of 1, 2, 3"]),
    "degree zero": ("[mesh]", "[mesh]\ntp = 0", ["[mesh] tp = 0: must be a positive degree"]),
    "two axes take the rest": ("[mesh]", "[mesh]\ndp_shard = -1\ntp = -1", ["only one axis can take all remaining ranks"]),
    "missing steps": ("steps = 2", "", ["[train] steps: missing"]),
    "missing seq_len": ("seq_len = 16", "", ["[data] seq_len: missing"]),
    # layouts that cannot work
    "more ranks than launched": ("[mesh]", "[mesh]\ntp = 2", ["tp 2 = 2 ranks, but there are 1; use 2 ranks"]),
    "axis without its technique": ("[mesh]", "[plugins.tensor]\nenabled = false\n[mesh]\ntp = 2", ["2 ranks, but there are 1", "[mesh] tp = 2: needs [plugins.tensor], which has enabled = false"]),
    "batch does not divide": ("global_batch_size = 8", "global_batch_size = 9\nmicro_batch_size = 2", ["[train] micro_batch_size = 2: must divide the 9 samples per step per rank"]),
    "heads over width": ("n_heads = 4", "n_heads = 3", ["dim 32 over n_heads 3", "n_heads 3 must be divisible by n_kv_heads 2"]),
    "kv heads": ("n_kv_heads = 2", "n_kv_heads = 3", ["n_heads 4 must be divisible by n_kv_heads 3"]),
    "sequence longer than the model": ("seq_len = 16", "seq_len = 64", ["[data] seq_len = 64: must be at most the model's max_seq_len, 32"]),
    "window without a position": ("dim = 32", "dim = 32\nsliding_window = 0", ["[model] sliding_window = 0: must be at least 1, or left out"]),
    "window longer than the sequence": ("dim = 32", "dim = 32\nsliding_window = 17", ["[data] seq_len = 16: no sequence fills the model's attention window of 17 positions; nearest that fit: seq_len 17, or a window of 16"]),
    "two wrappers": ("[plugins]", "[plugins.fsdp]\n[plugins.ddp]", ["[plugins.ddp] and [plugins.fsdp] cannot be enabled together"]),
    "precision without a wrapper": ("[plugins]", "[plugins.bf16]\n[plugins.fsdp]\nenabled = false", ["[plugins.bf16] requires mixed_precision"]),
    "two dtypes of compute": ("[plugins]", "[plugins.bf16]\n[plugins.fp16]", ["[plugins.fp16] and [plugins.bf16] cannot be enabled together: both set the dtype of forward and backward"]),
    "a loss scale that rounds": ("[plugins]", "[plugins.fp16]\ninit_scale = 1000", ["[plugins.fp16]: init_scale = 1000: must be a power of 2; nearest below: 512"]),
    "unknown backend of torch.compile": ("[plugins]", '[plugins.compile]\nbackend = "inducter"', ["backend = 'inducter': no backend of torch.compile (did you mean 'inductor'?)"]),
    "CUDA graphs over parameters that move": ("[plugins]", '[plugins.fsdp]\n[plugins.compile]\nmode = "reduce-overhead"', ['captures CUDA graphs, which replay fixed addresses, but [plugins.fsdp] gathers or casts parameters into newly allocated memory; use mode = "max-autotune-no-cudagraphs"']),
    # files
    "missing text": ("TEXT", "no/such/folder", ["no/such/folder"]),
    "missing plugin folder": ("[plugins]", '[plugins]\npath = ["no/such/plugins"]', ["no/such/plugins: no such folder or .py file"]),
    "missing base": ("[model]", 'base = "nowhere.toml"\n[model]', ["nowhere.toml: no such config file"]),
    "no TOML": ("[mesh]", "[mesh", ["is not TOML"]),
    "missing checkpoint": ("[mesh]", '[checkpoint]\nresume = "no/such/run"\n[mesh]', ["no/such/run"]),
    "mixture of nothing": ('name = "text"\npath = "TEXT"', "mixture = []", ["[data] mixture"]),
    "tokenizer larger than the model": ("vocab_size = 257", "vocab_size = 256", ["[model] vocab_size = 256, but the tokenizer has 257 ids"]),
    # several at once
    "all faults at once": (
        "[train]\nsteps = 2",
        "[train]\nstep = 2\nsteps = 0\nglobal_batch = 1",
        ["[train] step: unknown key", "[train] steps = 0", "[train] global_batch: unknown key"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_text(folder / "text")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_wrong_toml(case: str, text: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    old, new, expected = CASES[case]
    spoilt = GOOD.replace(old, new, 1).replace("TEXT", str(text / "text")).replace("CACHE", str(text / "cache"))
    assert spoilt != GOOD
    (tmp_path / "job.toml").write_text(spoilt)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPROC", "1")
    code = cli.main(["train", "--config", "job.toml"])
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert code == EXIT_WRONG_INPUT, lines
    assert len(lines) == len(expected), lines
    for piece in expected:
        assert any(piece in line for line in lines), (piece, lines)


def test_there_are_sixty_of_them() -> None:
    assert len(CASES) >= 60
