"""Compare simulated pipeline schedules with measured steps, given measured times of forward, backward and transfers.

    python -m bench.published_schedules ROWS.jsonl

The rows are those of arXiv 2401.10241 (tables 4, 5 and 9): GPT models on A100, with the throughput of a step and its
profiled T_F, T_B, T_W and T_comm. 1F1B and 1F1B-I are schedules of the pipeline plugin. ZB-1p and ZB-2p, which keep
the activations of at most p and 2 p micro batches, are built here by the greedy method of the paper's appendix. Each
rank runs what is ready, and uses weight-gradient actions to fill gaps and to free memory. Of several gap thresholds,
the one with the smallest bubble is taken.

Assumptions, none of them fitted:
- All stages take equally long, and a chunk of an interleaved stage takes its share. (The paper removes a layer from the
  first and the last stage, to make room for embedding and head.)
- Transfers block: an action is charged T_comm for receiving and T_comm for sending.
- The ranks of zero-bubble runs do not wait for each other before the update (the paper's "post-validation"). Their step
  is the longest time of a rank from its first to its last action. The step of the other schedules is that of all ranks
  together.
- The update, with unscaling and clipping, moves UPDATE_BYTES per parameter of a stage at HBM_RATE.
- The bubble is the paper's: transfers overlap with computation, and the update is not counted.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.contracts.base.cost import Action, Order
from titan.planner.step.schedule import Times, simulate
from titan.plugins.parallel.pipeline.orders import order

PLUGINS = {"1F1B": "1F1B", "1F1B-I": "Interleaved1F1B"}
LIMITS = {"ZB-1p": 1, "ZB-2p": 2}
GAPS = (0.0, 0.25, 0.5, 0.75)
"""Thresholds, as fractions of T_W, that a gap must exceed to be filled; the best one is taken."""
UPDATE_BYTES = 58
"""Mixed-precision Adam in fp32: unscale 8, norm 4, clip 8, Adam reads 16 and writes 12, weights copied 6, zeroed 4."""
HBM_RATE = 0.76 * 2.039e12
"""Bytes/s of an A100 80GB SXM: bandwidth of the data sheet times the fraction that large elementwise kernels reach."""


def schedule_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Measured and predicted step times of the rows that state times of forward, backward and transfers.

    Returns:
        id, schedule, measured_s, predicted_s, error (predicted / measured - 1), and, if the paper has one,
        measured_bubble and predicted_bubble, as fractions of the step.
    """
    return [
        _compare(row) for row in rows if "T_F_ms" in row.get("extra", {}) and row["schedule"] in (*PLUGINS, *LIMITS)
    ]


def _compare(row: Mapping[str, Any]) -> dict[str, Any]:
    f, b, w, send_s = (row["extra"][key] / 1e3 for key in ("T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms"))
    ranks, chunks, micro_batches = row["pp"], row.get("vpp", 1), row["grad_accum"]
    stages, kinds = ranks * chunks, {"F": f, "I": b, "W": w, "B": b + w}
    times = {kind: [seconds / chunks] * stages for kind, seconds in kinds.items()}
    if zero_bubbles := LIMITS.get(row["schedule"]):
        share = pending_share(row["hidden"], row["heads"], row["seq_len"])
        made = zero_bubble(ranks, micro_batches, times, send_s, zero_bubbles * ranks, share)
    else:
        made = order(PLUGINS[row["schedule"]], ranks, stages, micro_batches)
    predicted = step_s(made, times, send_s, blocking=True) + update_s(row["layers"], row["hidden"], ranks)
    work = micro_batches * (f + b + w)
    return {
        "id": row["id"],
        "schedule": row["schedule"],
        "measured_s": row["step_time_s"],
        "predicted_s": predicted,
        "error": predicted / row["step_time_s"] - 1,
        "measured_bubble": row.get("bubble_frac"),
        "predicted_bubble": 1 - work / step_s(made, times, send_s),
    }


def step_s(made: Order, times: Times, send_s: float, *, blocking: bool = False) -> float:
    """Seconds of the longest rank, from its first to its last action; blocking: transfers do not overlap."""
    timeline = simulate(made, times, send_s, blocking=blocking, keep=True)
    return max(end - actions[0][1] for end, actions in zip(timeline.ends, timeline.actions, strict=True))


def update_s(layers: int, hidden: int, ranks: int) -> float:
    """Seconds of the update on a middle stage: 12 h^2 parameters per layer, and two more layers over all ranks."""
    return (layers + 2) / ranks * 12 * hidden**2 * UPDATE_BYTES / HBM_RATE


def pending_share(hidden: int, heads: int, seq_len: int) -> float:
    """Fraction of a layer's activations saved until the weight gradients: 32 h of 34 h + 5 a s (section 2.3)."""
    return 32 * hidden / (34 * hidden + 5 * heads * seq_len)


# --- zero-bubble schedules ----------------------------------------------------------------------------------------


def zero_bubble(ranks: int, micro_batches: int, times: Times, send_s: float, limit: float, pending: float) -> Order:
    """The fastest schedule found in which no rank saves activations of more than `limit` micro batches.

    times: seconds by kind of action (F, I, W) and stage.  send_s: seconds of a send.  pending: fraction of a micro
    batch's activations that stays saved after I (the backward for inputs).
    """
    ways = [_Greedy(ranks, micro_batches, times, send_s, limit, pending, gap).run() for gap in GAPS]
    # The paper's own measure, in which transfers cost no work.
    return min(ways, key=lambda made: step_s(made, times, send_s))


@dataclass
class _Rank:
    """One rank on its way: what it has done of each kind, what it keeps, and when it is free."""

    actions: list[Action]
    ends: dict[str, list[float]]
    free: float = 0.0
    kept: float = 0.0


class _Greedy:
    """Ranks with one stage each; the one that is free first decides what it does next."""

    def __init__(
        self, ranks: int, micro_batches: int, times: Times, send_s: float, limit: float, pending: float, gap: float
    ) -> None:
        self.ranks = [_Rank([], {"F": [], "I": [], "W": []}) for _ in range(ranks)]
        self.micro_batches, self.times, self.send_s = micro_batches, times, send_s
        self.limit, self.pending, self.gap = limit, pending, gap

    def run(self) -> Order:
        """Schedule all actions greedily; returns the order of each rank's actions."""
        left = 3 * self.micro_batches * len(self.ranks)
        while left:
            # A rank whose input is not scheduled yet is tried again when another rank has moved.
            for stage in sorted(range(len(self.ranks)), key=lambda stage: self.ranks[stage].free):
                if self._move(stage):
                    left -= 1
                    break
            else:
                raise AssertionError("no rank can move")
        return [rank.actions for rank in self.ranks]

    def _move(self, stage: int) -> bool:
        """Let a rank begin what is best for it; False: nothing can begin yet."""
        rank = self.ranks[stage]
        room = rank.kept + 1 <= self.limit + 1e-9
        ready = {kind: self._ready(kind, stage) for kind in ("F", "I")}
        waiting = len(rank.ends["I"]) > len(rank.ends["W"])
        if not room and ready["F"] is not None and ready["I"] is None and waiting:
            return self._begin("W", stage, rank.free)
        if not room:
            ready["F"] = None
        known = {kind: max(at, rank.free) for kind, at in ready.items() if at is not None}
        if not known:
            return waiting and self._begin("W", stage, rank.free)
        # Of two that are ready, each in turn.
        last = next((action.kind for action in reversed(rank.actions) if action.kind != "W"), "I")
        first = min(known, key=lambda kind: (known[kind], kind == last))
        if waiting and known[first] - rank.free > self.gap * self.times["W"][stage]:
            return self._begin("W", stage, rank.free)
        return self._begin(first, stage, known[first])

    def _ready(self, kind: str, stage: int) -> float | None:
        """When the next of a kind can begin; None: not known, or no more."""
        number = len(self.ranks[stage].ends[kind])
        if number == self.micro_batches:
            return None
        if kind == "F" and stage == 0:
            return 0.0
        if kind == "I" and stage == len(self.ranks) - 1:
            before, lag = self.ranks[stage].ends["F"], 0.0
        else:
            before, lag = self.ranks[stage - 1 if kind == "F" else stage + 1].ends[kind], self.send_s
        return before[number] + lag if number < len(before) else None

    def _begin(self, kind: str, stage: int, at: float) -> bool:
        rank, last = self.ranks[stage], len(self.ranks) - 1
        number = len(rank.ends[kind])
        receives = stage > 0 if kind == "F" else stage < last and kind == "I"
        sends = stage < last if kind == "F" else stage > 0 and kind == "I"
        begin = max(rank.free + receives * self.send_s, at)
        end = begin + self.times[kind][stage]
        rank.ends[kind].append(end)
        rank.free = end + sends * self.send_s
        rank.kept += {"F": 1.0, "I": self.pending - 1, "W": -self.pending}[kind]
        rank.actions.append(Action(kind, stage, number))  # type: ignore[arg-type]
        return True


def main() -> None:
    """Print one line per row, then the mean and the largest error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.jsonl", help="measurements, one JSON object per line")
    found = schedule_rows(map(json.loads, parser.parse_args().rows.read_text().splitlines()))
    for row in found:
        print(
            f"{row['id']:<6} {row['schedule']:<7} measured {row['measured_s']:7.4f} s  "
            f"predicted {row['predicted_s']:7.4f} s  {row['error']:+6.1%}  "
            f"bubble measured {row['measured_bubble']:.4f} predicted {row['predicted_bubble']:.4f}"
        )
    errors = [abs(row["error"]) for row in found]
    bubbles = [abs(row["predicted_bubble"] - row["measured_bubble"]) for row in found if row["measured_bubble"]]
    print(
        f"{len(found)} rows: step error mean {sum(errors) / len(errors):.1%}, max {max(errors):.1%}; bubble error in "
        f"percentage points of the step, mean {100 * sum(bubbles) / len(bubbles):.2f}, max {100 * max(bubbles):.2f}"
    )


if __name__ == "__main__":
    main()
