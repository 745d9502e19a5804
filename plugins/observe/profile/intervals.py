"""Arithmetic of time intervals: where the time of a step went, as each instant counts once."""

from collections.abc import Iterable, Mapping, Sequence

Span = tuple[float, float]
"""Begin and end, in one unit; empty where the end is not after the begin."""


def union(spans: Iterable[Span]) -> list[Span]:
    """The same instants as disjoint spans, in order; spans that touch become one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def minus(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """The instants of `spans` that are in none of `others`, as disjoint spans in order."""
    left: list[Span] = []
    taken, at = union(others), 0
    for begin, end in union(spans):
        while at < len(taken) and taken[at][1] <= begin:
            at += 1
        while at < len(taken) and taken[at][0] < end:
            left.append((begin, taken[at][0]))
            begin = taken[at][1]
            if begin > end:  # and may reach into the next one
                break
            at += 1
        left.append((begin, end))
    return [span for span in left if span[1] > span[0]]


def inside(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """The instants of `spans` that are in one of `others` too."""
    whole = union(spans)
    return minus(whole, minus(whole, others))


def total(spans: Iterable[Span]) -> float:
    """Length of the union."""
    return sum(end - begin for begin, end in union(spans))


def first_come(spans: Iterable[tuple[float, float, str]]) -> dict[str, list[Span]]:
    """Name -> its spans, of (begin, end, name): where some overlap, the instant belongs to the one that began first."""
    found: dict[str, list[Span]] = {}
    covered = float("-inf")
    for begin, end, name in sorted(spans):
        if end > max(begin, covered):
            found.setdefault(name, []).append((max(begin, covered), end))
            covered = end
    return found


def divided(window: Span, layers: Sequence[Mapping[str, Iterable[Span]]]) -> dict[str, float]:
    """Name -> length within the window that counts for it; what no name has is "other". They add up to the window.

    An instant counts for the first name that has it, in the order of the layers and of the names in each.
    """
    left, found = union([window]), dict[str, float]()
    for layer in layers:
        for name, spans in layer.items():
            rest = minus(left, spans)
            found[name] = found.get(name, 0.0) + total(left) - total(rest)
            left = rest
    return {**found, "other": total(left)}
