"""What a process takes of its machine, such as file descriptors.

Each is a default: where the user or a scheduler has chosen, that choice stands.
"""

import resource
from contextlib import suppress

DESCRIPTORS = 1 << 20
"""Most that a process asks for: some systems have no hard limit at all."""


def raise_descriptor_limit() -> None:
    """Raise the limit of open files of this process and its children to the hard limit, at most `DESCRIPTORS`.

    A socket is an open file. The process that serves the store has a socket per rank of the run, and rank 0 of a gather
    has one per rank; the usual limit is 1,024. Silent where the system refuses.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
