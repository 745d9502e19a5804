"""The planner, as the trainer knows it: what a run asks of it, and where it is found.

Without one, options that a job leaves to memory have their usual values, and nothing is predicted. A job that asks
nothing imports no file of it.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, cast

from titan.contracts.base.cost import PredictedStep
from titan.packages import trainer_api

PACKAGE = "titan.planner"

Values = Mapping[str, Mapping[str, Any]]
"""Technique -> option -> value."""

J = TypeVar("J", contravariant=True)


class Planner(Protocol[J]):
    """What a run may ask; J is the type of a job. No call needs a device or communicates."""

    def choose(self, job: J, device_gib: float | None, cluster: str | None = None) -> tuple[Values, list[str]]:
        """Values for options that the job leaves to memory, and one sentence per such option.

        Usual values are left out, so that they still follow the layout of whoever reads the job's resolved table.
        device_gib: memory of one device, in GiB.  cluster: name or file of a cluster, whose devices count instead.

        Raises:
            ConfigError: there is no such cluster.
            PluginError: a technique's `unset_options` breaks its contract.
        """

    def predict(self, job: J, device: str, device_gib: float, cluster: str = "") -> PredictedStep | None:
        """The predicted step of a job; None: no built-in cluster has this device.

        device: its model, as PyTorch names it.  device_gib: its memory.  cluster: name or file of another cluster.

        Raises:
            ConfigError: there is no such cluster, or the job cannot be predicted.
        """

    def persistent_gib(self, job: J) -> list[tuple[float, float]]:
        """Per pipeline rank, GiB of weights and optimizer state on its device, and of what it keeps in the host's
        memory; zeros where costs cannot be predicted."""


def find_planner() -> "Planner[Any] | None":
    """The installed planner, a module with the functions of `Planner`; None and errors as of `packages.trainer_api`."""
    return cast("Planner[Any] | None", trainer_api(PACKAGE))
