"""Jobs and a cluster for tests of the planner: small, and with round numbers."""

from pathlib import Path

from titan.config import Job, load_job
from titan.planner.machine.cluster import Cluster, from_table
from titan.planner.step.layout import costs_of
from titan.planner.step.predict import Planner, Prediction

TOML = Path(__file__).parent / "configs" / "planned.toml"

CLUSTER: Cluster = from_table(
    {
        "name": "round numbers",
        "device": {
            "name": "round",
            "memory_gib": 80,
            "bandwidth_gb_s": 1000,
            "peak_tflops": {"float32": 100, "bfloat16": 200, "float8": 400},
            "power_w": 400,
            "idle_w": 100,
            "price": 3.6,
        },
        "kernels": {"matmul": {"float32": {"efficiency": 0.5}, "bfloat16": {"efficiency": 0.5}}},
        "links": [{"name": "inner", "ranks": 4, "bandwidth_gb_s": 100}, {"name": "outer", "bandwidth_gb_s": 10}],
    },
    "tests",
)
"""Four devices per node, which compute at 50 TFLOP/s in float32."""


def job_of(*words: str) -> Job:
    """A tiny llama with nothing on, under overrides."""
    return load_job(TOML, words)


def predicted(*words: str, cluster: Cluster = CLUSTER) -> Prediction:
    """What is planned for that job."""
    job = job_of(*words)
    return Planner(cluster).predict(costs_of(job), job.layout)


def small_cluster(folder: Path, memory_gib: float) -> str:
    """A cluster file of devices with this memory."""
    path = folder / "small.toml"
    path.write_text(
        f'[device]\nname = "small"\nmemory_gib = {memory_gib}\nbandwidth_gb_s = 1\n'
        '[device.peak_tflops]\nfloat32 = 1\n[[links]]\nname = "wire"\nbandwidth_gb_s = 1\n'
    )
    return str(path)
