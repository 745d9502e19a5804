"""Which rank failed first, and which rank prints an error, by the store that all ranks met at.

A light module: the launcher imports it too. `store` is that of the process group, on a rank, or as the launcher serves
it. Every function raises RuntimeError if the process that served the store is gone.
"""

import hashlib
import os

from torch._C._distributed_c10d import PrefixStore, Store


def attempt() -> str:
    """The key prefix of this start of the ranks.

    torchrun restarts ranks with the store of the former ones, where Gloo would find the addresses of dead ranks.
    """
    return f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def report(store: Store, rank: int) -> int:
    """Report that a rank fails; returns the rank that reported first."""
    return int(_whole(store).compare_set(_key("first to fail"), "", str(rank)))


def first(store: Store) -> int | None:
    """The rank that reported first; None where none has."""
    store, key = _whole(store), _key("first to fail")
    return int(store.get(key)) if store.check([key]) else None


def claim(store: Store, text: str, rank: int) -> bool:
    """Whether this rank is to print an error, as the first that asks of all ranks with the same text."""
    return int(_whole(store).compare_set(_key("printer", text), "", str(rank))) == rank


def confirm(store: Store, text: str) -> None:
    """Tell the other ranks that an error has been printed."""
    _whole(store).set(_key("printed", text), "")


def confirmed(store: Store, text: str) -> bool:
    """Whether an error has been printed."""
    return bool(_whole(store).check([_key("printed", text)]))


def explain(store: Store, rank: int) -> None:
    """Tell that the error of this rank has been printed, by this rank or by another one."""
    _whole(store).set(_key(f"explained {rank}"), "")


def explained(store: Store, rank: int) -> bool:
    """Whether the error of a rank has been printed as a message, so that its log says no more."""
    return bool(_whole(store).check([_key(f"explained {rank}")]))


def finish(store: Store) -> int:
    """Tell that this rank has failed and asks the store no more; returns how many have told so."""
    return int(_whole(store).add(_key("finished"), 1))


def finished(store: Store) -> int:
    """Number of ranks that have failed and ask the store no more."""
    return int(_whole(store).add(_key("finished"), 0))


def _whole(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _key(what: str, text: str = "") -> str:
    digest = f" {hashlib.sha256(text.encode(errors='replace')).hexdigest()}" if text else ""
    return f"{attempt()}/{what}{digest}"
