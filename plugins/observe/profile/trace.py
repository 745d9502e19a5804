"""What ran when, from the trace of torch.profiler: JSON in Chrome's format, times in microseconds.

On an accelerator computation is its kernels, on all streams, and communication the kernels of NCCL or RCCL. Each of
these has the name of its process group, except batches of sends and receives: PyTorch launches their kernels outside
of what it annotates (github.com/pytorch/pytorch/issues/194693). A kernel belongs to the phase in which the host
launched it.

On a CPU computation is the operations of the main thread, without those that wait for others, and communication what
gloo does, from the call of a collective until its result is there. Gloo does not name the group, but a thread of its
own serves one group alone: it is that whose collectives precede its work most often, as the host annotates them.
"""

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from titan.contracts.base.layout import Layout

from .intervals import Span, divided, first_come, inside, minus, union

Event = Mapping[str, Any]
OVER = "titan: collective over "
"""Annotation of a collective that the host calls, without the axes."""

_STEP, _DATA, _OPTIMIZER = "ProfilerStep#", "titan: data", "titan: optimizer"
_NCCL = re.compile("(?i)nccl|rccl")
_SENDS = re.compile("(?i)sendrecv")
_WAITS = ("c10d::", "_c10d_functional::")


class Activity(NamedTuple):
    """What a trace says of some steps.

    steps: of the host.  data: the host waits for the loader.  compute, update: computation outside and inside of the
    optimizer.  sent: (begin, end, axes) of communication.  updating: the host is in the optimizer.
    """

    steps: list[Span]
    data: list[Span]
    compute: list[Span]
    update: list[Span]
    sent: list[tuple[float, float, str]]
    updating: list[Span]


def axis_of_batches(layout: Layout) -> str:
    """The axis to which batches of sends and receives belong where their kernels name no group; empty: to all ranks.

    Stages of a pipeline send in batches, and without a pipeline workers that exchange weights with their neighbors.
    """
    stages = (axis for axis in layout.axes_of("layers") if layout.degree(axis) > 1)
    return next(stages, layout.worker_axis)


def seconds_per_step(
    trace: Mapping[str, Any], steps: int, groups: Mapping[str, str], batches: str = ""
) -> dict[str, float]:
    """Where the time of the first `steps` steps of a trace went, in seconds per step; the sum is a step.

    Keys: "compute", "update", "data", "other", and the axes of each process group, for communication that neither
    computation nor waiting for data covers.
    groups: name of a process group -> its axes; of other groups, the key is "".
    batches: axis of sends and receives without the name of a group.

    Raises:
        LookupError: the trace has fewer steps, as the profiler drops events where its buffers are full; or an event
            lacks a field.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_device = any(event.get("cat") == "kernel" for event in events)
    done = _of_device(events, groups, batches) if on_device else _of_host(events)
    if len(done.steps) < steps:
        raise LookupError(f"the trace has {len(done.steps)} of the {steps} steps that were recorded")
    begin, end = done.steps[0][0], done.steps[steps - 1][1]
    sent = {f"sent {axes}": spans for axes, spans in first_come(done.sent).items()}
    busy = {"update": done.update, "compute": done.compute}
    # A device computes while its host waits for data. On a CPU the loader's own operations are no computation.
    layers = [busy, sent, {"data": done.data}] if on_device else [{"data": done.data}, busy, sent]
    found = divided((begin, end), [*layers, {"update": [] if on_device else done.updating}])
    return {name.removeprefix("sent "): micro_s / 1e6 / steps for name, micro_s in found.items()}


def _of_device(events: Sequence[Event], groups: Mapping[str, str], batches: str) -> Activity:
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    updating = _annotated(events, _OPTIMIZER)
    compute, update, sent = [], [], []
    for event in events:
        if event.get("cat") != "kernel":
            continue
        arguments, span = event.get("args", {}), _span(event)
        if _NCCL.search(event["name"]):
            group = arguments.get("Process Group Name")
            in_batch = group is None and _SENDS.search(event["name"])
            sent.append((*span, batches if in_batch else groups.get(str(group), "")))
        elif _within(launches.get(arguments.get("correlation"), event["ts"]), updating):
            update.append(span)
        else:
            compute.append(span)
    return Activity(_annotated(events, _STEP), _annotated(events, _DATA), compute, update, sent, updating)


def _of_host(events: Sequence[Event]) -> Activity:
    steps = (event for event in events if _is_annotation(event) and event["name"].startswith(_STEP))
    main = next(steps, {"tid": None})["tid"]
    own = [event for event in events if event["tid"] == main and not event["name"].startswith("gloo:")]
    operations = union(
        span for event, span in _innermost(own) if event["cat"] == "cpu_op" and not event["name"].startswith(_WAITS)
    )
    updating = _annotated(own, _OPTIMIZER)
    update = inside(operations, updating)
    sent = list(_by_gloo(events, main))
    return Activity(_annotated(own, _STEP), _annotated(own, _DATA), minus(operations, updating), update, sent, updating)


def _by_gloo(events: Sequence[Event], main: Any) -> Iterator[tuple[float, float, str]]:
    """What gloo does, with the axes of the group for which its thread does it."""
    calls = sorted(
        (event["ts"], event["name"].removeprefix(OVER)) for event in events if event["name"].startswith(OVER)
    )
    begins = [begin for begin, _ in calls]
    done = [event for event in events if event["name"].startswith("gloo:")]

    def called_before(event: Event) -> str:
        place = bisect.bisect_right(begins, event["ts"])
        return calls[place - 1][1] if place else ""

    votes: dict[Any, Counter[str]] = defaultdict(Counter)
    for event in done:
        votes[event["tid"]][called_before(event)] += 1
    for event in done:
        thread = event["tid"]
        yield *_span(event), called_before(event) if thread == main else votes[thread].most_common(1)[0][0]


def _innermost(events: Iterable[Event]) -> Iterator[tuple[Event, Span]]:
    """The events of one thread, each with the spans in which no other event inside of it runs."""
    open_: list[tuple[Event, float]] = []
    at = 0.0

    def until(moment: float) -> Iterator[tuple[Event, Span]]:
        """What runs from `at` until a moment at which an event begins, or for ever."""
        nonlocal at
        while open_ and open_[-1][1] <= moment:
            event, end = open_.pop()
            yield event, (at, end)
            at = max(at, end)
        if open_:
            yield open_[-1][0], (at, moment)

    for event in sorted((event for event in events if "cat" in event), key=lambda event: (event["ts"], -event["dur"])):
        begin, end = _span(event)
        yield from until(begin)
        at = begin
        open_.append((event, min(end, open_[-1][1]) if open_ else end))
    yield from until(float("inf"))


def _annotated(events: Iterable[Event], name: str) -> list[Span]:
    return sorted(_span(event) for event in events if _is_annotation(event) and event["name"].startswith(name))


def _is_annotation(event: Event) -> bool:
    return bool(event.get("cat") == "user_annotation")


def _within(moment: float, spans: Sequence[Span]) -> bool:
    place = bisect.bisect_right(spans, (moment, float("inf")))
    return place > 0 and moment < spans[place - 1][1]


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]
