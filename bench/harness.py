"""Compare `titan eval` with the Language Model Evaluation Harness on published folders: the nats of each document.

    pip install lm-eval
    python -m bench.harness

The folders are those of tests/published_folders.py: BOS by the post-processor, BOS in name only, no BOS, one special
token for all, a SentencePiece vocabulary. Documents are shorter than a window, as long, and many windows long.
"""

import io
import json
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lm_eval
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from bench import results
from tests.published_folders import FOLDERS, TEXT, folder
from titan import cli

TEXTS = ["a", "the cat sat on the mat. ", TEXT * 2, TEXT * 40, "rain, 345 birds; ü - 東 " * 30, TEXT[7:] * 11]


def main() -> None:
    """Score every document both ways, print a row for each folder, write the results."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in tqdm(sorted(FOLDERS), disable=None):
            path = folder(name, Path(temporary))
            theirs = _theirs(path)
            ours = [_ours(path, text, Path(temporary)) for text in TEXTS]
            worst = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
            rows.append({"folder": name, "documents": len(TEXTS), "nats": sum(theirs), "largest_difference": worst})
    for row in rows:
        print(f"{row['folder']:<14}   {row['nats']:>12.3f} nats   differs by {row['largest_difference']:.1e} at most")
    versions = {"lm_eval": lm_eval.__version__, "transformers": transformers.__version__}
    print(results.write("harness", {**versions, "rows": rows}))


def _theirs(path: Path) -> list[float]:
    with redirect_stdout(io.StringIO()):
        model = HFLM(str(path), device="cpu", dtype="float32", batch_size=1)
        requests = [Instance("loglikelihood_rolling", {}, (text,), number) for number, text in enumerate(TEXTS)]
        return [-total for total in model.loglikelihood_rolling(requests, disable_tqdm=True)]


def _ours(path: Path, text: str, temporary: Path) -> float:
    (temporary / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    words = ["--checkpoint", str(path), "--data", "jsonl", "--path", str(temporary / "text.jsonl"), "--json"]
    with redirect_stdout(io.StringIO()) as out:
        assert cli.main(["eval", *words]) == 0
    report: dict[str, Any] = json.loads(out.getvalue())
    return float(report["loss"] * report["tokens"])


if __name__ == "__main__":
    main()
