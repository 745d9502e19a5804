"""What the trainer asks of the planner: the functions of `titan.contracts.planner.Planner`."""

from titan.config import Job
from titan.contracts.base.cost import PredictedStep
from titan.contracts.planner import Values
from titan.planner.machine import cluster as clusters
from titan.planner.machine.cluster import DeviceMemory
from titan.planner.search import unset_options
from titan.planner.step.layout import costs_of
from titan.planner.step.memory import GIB, memories
from titan.planner.step.predict import Planner


def choose(job: Job, device_gib: float | None, cluster: str | None = None) -> tuple[Values, list[str]]:
    """See `titan.contracts.planner.Planner.choose`."""
    if cluster is not None:
        return unset_options.choose(job, clusters.load(cluster).memory)
    return unset_options.choose(job, None if device_gib is None else DeviceMemory(device_gib))


def predict(job: Job, device: str, device_gib: float, cluster: str = "") -> PredictedStep | None:
    """See `titan.contracts.planner.Planner.predict`."""
    if name := cluster or clusters.of_device(device, device_gib):
        where = clusters.load(name)
        return PredictedStep(cluster=where.name, time_s=Planner(where).predict(costs_of(job), job.layout).time_s)
    return None


def persistent_gib(job: Job) -> list[tuple[float, float]]:
    """See `titan.contracts.planner.Planner.persistent_gib`."""
    try:
        found = memories(costs_of(job), job.layout, DeviceMemory(0.0))
    except Exception:  # training needs no estimate: whatever a model states, it goes on without one
        return [(0.0, 0.0)]
    return [((each.parameters + each.optimizer) / GIB, each.host / GIB) for each in found]
