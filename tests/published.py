"""A published run for tests of the planner's accuracy: a GPT on 64 devices, and what a test changes of it."""

from typing import Any

GPT: dict[str, Any] = {"id": "g", "layers": 48, "hidden": 4096, "heads": 32, "seq_len": 2048, "vocab": 50257}
GPT |= {"gpu": "A100-SXM-80GB", "gpu_mem_gb": 80, "n_gpus": 64}
GPT |= {"tp": 4, "pp": 4, "mbs": 2, "gbs": 256, "recompute": "full", "precision": "fp16"}
GPT |= {"framework": "Megatron-LM 6985e58", "step_time_s": 10.0, "source": "a paper"}


def row(**changed: Any) -> dict[str, Any]:
    """A row of a GPT on 64 devices; None: not stated."""
    return {key: value for key, value in {**GPT, **changed}.items() if value is not None}
