"""Rows of published measurements, and the values that follow from the keys that a row states.

A row is a JSON object; `Row` lists the keys that are read. A missing key is inferred if that is arithmetic (data
parallelism from ranks, micro batches from the global batch, the width of heads). Otherwise the row is skipped, with the
reason.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parents[3] / "shared" / "validation" / "published.jsonl"
OWN = Path(__file__).parent / "rows.jsonl"


MOST = {
    "layers": 1000,
    "hidden": 200_000,
    "ffn": 1_000_000,
    "heads": 2000,
    "seq_len": 4_000_000,
    "vocab": 4_000_000,
    "n_gpus": 200_000,
    "gpus_per_node": 1024,
    "mbs": 10_000,
    "gbs": 1_000_000,
    "grad_accum": 20_000,
    "vpp": 100,
}
"""Larger numbers are taken for an error in the row."""


class Skip(Exception):
    """A row that cannot be predicted, with the reason."""


def load(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, one JSON object a line.

    Raises:
        ValueError: a line is not a JSON object.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: not a JSON object")
            rows.append({"id": f"line {number}", **row})
    return rows


def default() -> Path:
    """The file of rows: the one beside the repository if there is one, else bench/published/rows.jsonl."""
    return SHARED if SHARED.is_file() else OWN


@dataclass(frozen=True, kw_only=True)
class Row:
    """The job of a row, with values that follow from others.

    recompute: none, full, alternate, products, core (that of attention), or selective where the row says no more.

    guessed: keys that the row does not state and that have a default here.
    """

    layers: int
    hidden: int
    ffn: int
    gated: bool
    heads: int
    kv_heads: int
    seq_len: int
    vocab: int
    ranks: int
    per_node: int
    tp: int
    pp: int
    dp: int
    cp: int
    chunks: int
    micro_batch: int
    micro_batches: int
    recompute: str
    sequence_parallel: bool
    precision: str
    zero: int
    zero_group: int
    flash: bool | None
    ends_count: bool
    tied: bool | None
    schedule: str
    guessed: tuple[str, ...]

    @property
    def head_dim(self) -> float:
        """Dimension of an attention head."""
        return self.hidden / self.heads

    @property
    def global_batch(self) -> int:
        """Global batch size: sequences per step."""
        return self.micro_batch * self.micro_batches * self.dp

    @property
    def params(self) -> float:
        """Of the whole model, the table of words once or twice not counted."""
        return self.layers * self.layer_params

    @property
    def layer_params(self) -> float:
        """Weights of the matrix products of one layer."""
        attention = self.hidden * (2 * self.hidden + 2 * self.hidden * self.kv_heads / self.heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn


def _number(row: Mapping[str, Any], key: str) -> int:
    value = row.get(key)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else 0


def read(row: Mapping[str, Any]) -> Row:
    """The job of a row.

    Raises:
        Skip: the row lacks values or contradicts itself; says which.
    """
    guessed: list[str] = []
    for key, most in MOST.items():
        if _number(row, key) > most:
            raise Skip(f"{key} = {row[key]} exceeds the plausible maximum {most}")
    lacks = [key for key in ("layers", "hidden", "seq_len") if not _number(row, key)]
    if lacks:
        raise Skip(f"not stated: {', '.join(lacks)}")
    layers, hidden = _number(row, "layers"), _number(row, "hidden")

    def known(key: str, otherwise: int) -> int:
        value = _number(row, key)
        if not value:
            guessed.append(key)
        return value or otherwise

    gated = bool(row.get("gated_mlp", False))
    tp, pp, cp = (_number(row, key) or 1 for key in ("tp", "pp", "cp"))
    heads = known("heads", _usual_heads(hidden, tp))
    kv_heads = _number(row, "kv_heads") or heads
    ffn = _number(row, "ffn") or (round(8 / 3 * hidden / 256) * 256 if gated else 4 * hidden)
    ranks = _number(row, "n_gpus") or tp * pp * cp * (_number(row, "dp") or _number(row, "fsdp") or 1)
    if ranks % (tp * pp * cp):
        raise Skip(f"{ranks} ranks are not a multiple of tp {tp} x pp {pp} x cp {cp}")
    dp = ranks // (tp * pp * cp)
    chunks = known("vpp", 1) if pp > 1 else 1
    if pp * chunks > layers:
        raise Skip(f"more stages ({pp} x {chunks}) than layers ({layers})")
    micro_batch, micro_batches = _batches(row, dp)
    if micro_batches * pp * chunks > 500_000:
        raise Skip(f"{micro_batches} micro batches through {pp * chunks} stages exceed the plausible maximum")
    if heads > hidden or kv_heads > heads:
        raise Skip(f"impossible: {heads} heads, {kv_heads} key-value heads, width {hidden}")
    extra = row["extra"] if isinstance(row.get("extra"), dict) else {}
    ends = bool(extra.get("embedding_balanced_partition")) or (
        layers % (pp * chunks) > 0 and (layers + 2) % (pp * chunks) == 0
    )
    zero = row.get("zero_stage")
    return Row(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        gated=gated,
        heads=heads,
        kv_heads=kv_heads,
        seq_len=_number(row, "seq_len"),
        vocab=known("vocab", 51200),
        ranks=ranks,
        per_node=_number(row, "gpus_per_node") or 8,
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        chunks=chunks,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        recompute=_recompute(row, guessed),
        sequence_parallel=bool(row.get("seq_parallel")) and tp > 1,
        precision=str(row.get("precision") or "bf16").lower(),
        zero=int(zero) if zero in (1, 2, 3) else 0,
        zero_group=_zero_group(extra, dp, tp),
        flash=_flash(row),
        ends_count=ends,
        tied=extra.get("tied_embeddings"),
        schedule=str(row.get("schedule") or "").lower(),
        guessed=tuple(guessed),
    )


def _usual_heads(hidden: int, tp: int) -> int:
    """Heads about 128 wide that divide the width evenly, and that the ranks of a layer can share."""
    even = [heads for heads in range(1, hidden + 1) if hidden % heads == 0]
    shared = [heads for heads in even if heads % tp == 0]
    return min(shared or even, key=lambda heads: abs(hidden / heads - 128))


def _batches(row: Mapping[str, Any], dp: int) -> tuple[int, int]:
    """Sequences of a micro batch, and micro batches per step."""
    size, count, whole = (_number(row, key) for key in ("mbs", "grad_accum", "gbs"))
    if size and whole and whole % (size * dp) == 0:
        return size, whole // (size * dp)
    if size and count:
        return size, count
    if whole and count and whole % (count * dp) == 0:
        return whole // (count * dp), count
    if size and not whole:
        return size, 1
    raise Skip(f"not stated: micro batches (mbs {size or '-'}, gbs {whole or '-'}, dp {dp})")


def _recompute(row: Mapping[str, Any], guessed: list[str]) -> str:
    said = str(row.get("recompute") or "").lower()
    if not said:
        guessed.append("recompute")
    if "selective layer" in said:
        return "alternate"
    if "core" in said or "attention" in said:
        return "core"
    if re.search(r"\bop\b", said):
        return "products"
    if "selective" in said:
        return "selective"
    return "full" if said.startswith("full") else "none"


def _flash(row: Mapping[str, Any]) -> bool | None:
    said = str(row.get("attention") or "").lower()
    if not said:
        return None
    return "unfused" not in said


def _zero_group(extra: Mapping[str, Any], dp: int, tp: int) -> int:
    """Ranks of data parallelism that share the optimizer's state."""
    said = extra.get("zero1_group")
    found = re.search(r"within (\d+)|^(\d+)$", str(said)) if said is not None else None
    size = int(found.group(1) or found.group(2)) if found else dp
    return size if size and dp % size == 0 else dp


def measured(row: Mapping[str, Any], job: Row) -> float | None:
    """Measured step time in seconds: as stated, or from tokens, samples or FLOP/s; None if the row has none of them."""
    tokens = job.global_batch * job.seq_len
    if seconds := _positive(row, "step_time_s"):
        return seconds
    if rate := _positive(row, "tokens_per_s_per_gpu"):
        return tokens / (rate * job.ranks)
    if rate := _positive(row, "tokens_per_s"):
        return tokens / rate
    if rate := _positive(row, "samples_per_s"):
        return job.global_batch / rate
    if rate := _positive(row, "samples_per_s_per_gpu"):
        return job.global_batch / (rate * job.ranks)
    if tflops := _positive(row, "tflops_per_gpu"):
        passes = 4 if "hardware" in str(row.get("tflops_kind")) and job.recompute == "full" else 3
        return _flops(job, passes) * tokens / (tflops * 1e12 * job.ranks)
    if share := _positive(row, "mfu") * _positive(row, "peak_tflops"):
        return _flops(job, 3) * tokens / (share * 1e12 * job.ranks)
    return None


def _positive(row: Mapping[str, Any], key: str) -> float:
    """A number of a row; 0 where it states none."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else 0.0


def _flops(job: Row, passes: int) -> float:
    """A token's, with so many passes through the layers (forward once, backward two, recompute one)."""
    layer = 2 * job.layer_params + 4 * job.seq_len * job.hidden
    return passes * job.layers * layer + 6 * job.hidden * job.vocab
