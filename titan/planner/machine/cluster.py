"""A cluster as a TOML file: what a device can do, what kernels reach of that, what joins the devices, what it costs.

    [device]        name, memory, bandwidth, power, price; peak_tflops per dtype
    [kernels]       what kernels reach: shares of the peaks, time to launch one
    [kernels.matmul.DTYPE]   efficiency of matrix products, or measured points
    [[links]]       from inner to outer: a level of the network and how many ranks it joins

`configs/clusters` has the usual ones; `titan doctor --output FILE` writes one for the ranks at hand.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import titan.configs
from titan.contracts.base.options import REQUIRED, Where, did_you_mean, option, parse
from titan.errors import ConfigError, ConfigIssue, by_errno

FOLDER = Path(next(iter(titan.configs.__path__))) / "clusters"
DTYPES = ("float32", "float16", "bfloat16", "float8")
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class Device:
    """`[device]`: one rank's share of the hardware. `[device.peak_tflops]`: dense peaks as the vendor states them."""

    name: str = option(REQUIRED, "what it is called")
    memory_gib: float = option(REQUIRED, "memory that processes can use", unit="GiB", above=0)
    reserved_gib: float = option(0.0, "of it taken by the driver and communicators", unit="GiB", at_least=0)
    fragmented: float = option(0.0, "share of activations and buffers that the allocator cannot use", at_least=0)
    bandwidth_gb_s: float = option(REQUIRED, "memory bandwidth", unit="GB/s", above=0)
    processors: int = option(
        0, "ranks of a node that can work at full speed at once; rates are those of all at work; 0: all", at_least=0
    )
    units: int = option(1, "processors that share a product in tiles (SMs, CUs)", at_least=1)
    power_w: float = option(0.0, "power at work", unit="W", at_least=0)
    idle_w: float = option(0.0, "power at rest", unit="W", at_least=0)
    price: float = option(0.0, "price of a device", unit="currency/hour", at_least=0)


@dataclass(frozen=True, kw_only=True)
class Products:
    """`[kernels.matmul.DTYPE]`: what share of the peak matrix products reach."""

    efficiency: float = option(0.7, "share of the peak that the largest products reach", above=0)
    tile: tuple[int, int] = option((128, 128), "rows and columns that one unit works on at a time", at_least=1)
    quantised: float = option(1.0, "how much of what a last, partly filled wave of tiles wastes is lost", at_least=0)
    depth: float = option(0.0, "reduction length at which a product reaches half of its efficiency", at_least=0)
    aligned: int = option(1, "sizes that are a multiple of this are fast", at_least=1)
    unaligned: float = option(1.0, "share of its speed that a product keeps for each halving below that", above=0)
    odd: float = option(1.0, "share that it keeps, moreover, where a size is no multiple of 16 bytes", above=0)
    few: int = option(0, "a batch of at most so many products can be slow: of widths between", at_least=0)
    few_between: tuple[int, int] = option((1, 1_000_000), "these two; as libraries have gaps in what they choose well")
    few_kept: float = option(1.0, "share of their speed that those keep", above=0)
    points: tuple[str, ...] = option((), '"FLOPs TFLOP/s" as measured, by FLOPs; take the place of all of the above')

    def curve(self) -> list[tuple[float, float]]:
        """The points as (FLOPs, FLOP/s).

        Raises:
            ValueError: one is not two numbers.
        """
        pairs = [point.split() for point in self.points]
        return sorted((float(flops), float(tflops) * 1e12) for flops, tflops in pairs)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """`[kernels]`: what kernels reach of a device's peaks."""

    attention_forward: float = option(
        0.3, "share of the peak that attention reaches, in FLOPs that are needed", above=0
    )
    attention_backward: float = option(0.25, "the same in its backward", above=0)
    causal: bool = option(True, "attention skips what a position may not see")
    bandwidth: float = option(0.8, "share of the memory bandwidth that elementwise operations reach", above=0)
    update_bandwidth: float = option(0.0, "the same for the optimizer; 0: as other operations", at_least=0)
    join_us: float = option(
        0.0, "time that each collective between slices of layers takes beyond its own", unit="us", at_least=0
    )
    gather_us: float = option(
        0.0, "the same of each that gathers a shard unit or reduces its gradient", unit="us", at_least=0
    )
    launch_us: float = option(0.0, "time that each operation takes at least", unit="us", at_least=0)
    merged: float = option(0.6, "share of its memory traffic that compiling leaves an elementwise operation", above=0)
    fused_norms: bool = option(True, "a norm is one kernel, and keeps its input alone")
    overlap_slowdown: float = option(0.0, "share of hidden communication by which it slows computation", at_least=0)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One of `[[links]]`: a level of the network. Bandwidth is a rank's, one way, with all ranks of it at work."""

    name: str = option(REQUIRED, "what it is called")
    ranks: int = option(0, "ranks that it joins; 0: any number", at_least=0)
    gb_s: float = option(REQUIRED, "bandwidth of a rank, one way", unit="GB/s", above=0)
    latency_us: float = option(0.0, "time of one message", unit="us", at_least=0)
    efficiency: float = option(1.0, "share of the bandwidth that collectives reach", above=0)
    pair_efficiency: float = option(1.0, "share of it that one rank reaches sending to another", above=0)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster. `links` stand from inner to outer; the last joins any number of ranks."""

    name: str
    source: str
    device: Device
    peak_tflops: Mapping[str, float]
    kernels: Kernels
    products: Mapping[str, Products]
    links: tuple[Link, ...]
    place: str = field(default="", compare=False)

    @cached_property
    def ranks_per_node(self) -> int:
        """Ranks that the innermost link joins; 0 where it joins any number."""
        return self.links[0].ranks if self.links else 0

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s.

        Raises:
            ConfigError: the file does not state it for this dtype.
        """
        if dtype not in self.peak_tflops:
            known = ", ".join(self.peak_tflops)
            raise ConfigError([ConfigIssue(self.place, f"[device.peak_tflops] has no {dtype} (it has {known})")])
        return self.peak_tflops[dtype] * 1e12


def names() -> list[str]:
    """The clusters that came with titan."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def load(name: str) -> Cluster:
    """The cluster of a file, or the one of that name which came with titan.

    Raises:
        ConfigError: there is none, or the file has faults; lists all of them.
    """
    path = next((path for path in (Path(name).expanduser(), FOLDER / f"{name}.toml") if path.is_file()), None)
    if path is None:
        raise ConfigError([ConfigIssue("--cluster", f"{name}: no such file or cluster{did_you_mean(name, names())}")])
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise by_errno(error, ConfigError([ConfigIssue(str(path), f"cannot be read as TOML: {error}")])) from None
    return from_table(table, str(path))


def from_table(table: Mapping[str, Any], place: str) -> Cluster:
    """The cluster of a parsed TOML; `place` says in messages where it is from.

    Raises:
        ConfigError: with every fault found.
    """
    reader = _Reader(place)
    known = ("name", "source", "device", "kernels", "links")
    for key in table:
        if key not in known:
            reader.faults.append(ConfigIssue(place, f"{key}: unknown key{did_you_mean(key, known)}"))
    device, peaks = dict(table.get("device", {})), {}
    peaks = reader.numbers(device.pop("peak_tflops", {}), "device.peak_tflops")
    kernels = dict(table.get("kernels", {}))
    products = {d: reader.parse(Products, t, f"kernels.matmul.{d}") for d, t in kernels.pop("matmul", {}).items()}
    links = [reader.parse(Link, link, f"links.{i}") for i, link in enumerate(table.get("links", ()))]
    parsed = reader.parse(Device, device, "device"), reader.parse(Kernels, kernels, "kernels")
    if reader.faults:
        raise ConfigError(reader.faults)
    return Cluster(
        name=str(table.get("name", Path(place).stem)), source=str(table.get("source", "")), device=parsed[0],
        peak_tflops=peaks, kernels=parsed[1], products=products, links=tuple(links), place=place,
    )  # fmt: skip


class _Reader:
    """Parses tables and gathers their faults."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.faults: list[ConfigIssue] = []

    def parse(self, config: type[C], values: Mapping[str, Any], table: str) -> Any:
        parsed, faults = parse(config, values, Where(table, self.place))
        self.faults += faults
        return parsed

    def numbers(self, values: Mapping[str, Any], table: str) -> dict[str, float]:
        """TFLOP/s by dtype."""
        where = Where(table, self.place)
        for key, value in values.items():
            if key not in DTYPES:
                self.faults.append(where.fault(key, f"unknown dtype{did_you_mean(key, DTYPES)}"))
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                self.faults.append(where.fault(key, f"= {value!r}: must be a number above 0"))
        if not values:
            self.faults.append(where.fault("", "missing; it states TFLOP/s by dtype"))
        return {key: float(value) for key, value in values.items() if isinstance(value, (int, float))}


def spans(ranks: Sequence[int], links: Sequence[Link]) -> int:
    """Number of the innermost link that joins all of these ranks."""
    for number, link in enumerate(links):
        if not link.ranks or len({rank // link.ranks for rank in ranks}) == 1:
            return number
    return len(links) - 1
