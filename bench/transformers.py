"""Compare titan with a bare loop of transformers and PyTorch: largest relative differences over the steps of a run.

    python -m bench.transformers

Both start from the same weights and train on the same samples, in fp32 on the CPU. tests/transformers_curve.py has the
models, the loop and the layouts; tests/dist/test_transformers.py holds the differences to the tolerances.
"""

import io
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from bench import results
from tests.transformers_curve import CASES, LAYOUTS, STEPS, Reference, runs
from titan.testing.jobs import deviations


def main() -> None:
    """Train every model at every layout, print a row for each, write the results."""
    torch.set_num_threads(1)  # as the ranks do
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):  # the ranks' logs
        for case in tqdm(CASES, disable=None):
            reference = Reference(case, Path(folder, case))
            for layout in (layout for one, layout in runs() if one == case):
                found = deviations(reference.outcome, reference.titan(layout))
                rows.append({"model": case, "ranks": LAYOUTS[layout][0], "layout": layout, **found})
    for row in rows:
        figures = f"loss {row['loss']:.1e}   gradient norm {row['grad_norm']:.1e}   weights {row['weights']:.2f}"
        print(f"{row['model']:<20}   {row['layout']:<16}   {figures} of the bound")
    print(results.write("transformers", {"transformers": transformers.__version__, "steps": STEPS, "rows": rows}))


if __name__ == "__main__":
    main()
