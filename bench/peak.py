"""The most memory that this process has held at once, by Linux's /proc."""

import ctypes
import re
from pathlib import Path


def forget_peak() -> None:
    """Count from here. What steps have freed is given back first: a rank on a CPU keeps it for the next one.

    Needs glibc.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """The most since the start, or since it was last forgotten."""
    return status_mib("VmHWM")


def status_mib(key: str) -> float:
    """A size of this process, by its name in /proc."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {key}"
    return int(found[1]) / 1024
