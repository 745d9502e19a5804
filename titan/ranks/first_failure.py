"""Which rank failed first, by the store that all ranks met at. A light module: the launcher imports it too."""

import os

from torch._C._distributed_c10d import PrefixStore, Store


def attempt() -> str:
    """The key prefix of this start of the ranks.

    torchrun restarts ranks with the store of the former ones, where Gloo would find the addresses of dead ranks.
    """
    return f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def report(store: Store, rank: int) -> int:
    """Report that a rank fails; returns the rank that reported first. store: of the process group, on a rank.

    Raises:
        RuntimeError: the process that served the store is gone.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return int(store.compare_set(_key(), "", str(rank)))


def first(store: Store) -> int | None:
    """The rank that reported first; None where none has. store: as the launcher serves it.

    Raises:
        RuntimeError: the store does not answer.
    """
    return int(store.get(_key())) if store.check([_key()]) else None


def _key() -> str:
    return f"{attempt()}/first to fail"
