"""Cluster files: TOML descriptions of devices, of the efficiency of their kernels, and of the network between them.

    [device]                 name, memory, memory bandwidth, power and price of one rank's device
    [device.peak_tflops]     dense peak in TFLOP/s per dtype
    [kernels]                fractions of the peaks that kernels reach, and fixed overheads in microseconds
    [kernels.matmul.DTYPE]   efficiency of matrix multiplications, or measured points
    [[links]]                network levels from inner to outer: bandwidth, latency, efficiency
    [between_sites]          optional: one more level, between sites of some nodes each
    base                     optional: another cluster, whose keys hold where this file has none

`configs/clusters` holds the clusters that come with titan; `titan doctor --output FILE` measures one and writes its
file.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import titan.configs
from titan.config.tables import read_toml
from titan.contracts.plugin.options import REQUIRED, Where, did_you_mean, option, parse
from titan.errors import ConfigError, ConfigIssue
from titan.paths import expanded

FOLDER = Path(next(iter(titan.configs.__path__))) / "clusters"
DTYPES = ("float32", "float16", "bfloat16", "float8")
C = TypeVar("C")
MEMORY_LIMIT = 0.95
"""Largest predicted peak of a layout that titan chooses, as a fraction of the device's memory.

Predictions are off by 3.6 % on average for the memory of whole processes (50 rows of grade A, in-sample), and by 7.5 %
for other figures (docs/validation.md, "Memory"). A layout that fills a device by prediction may run out of memory.
"""

SAME_MEMORY = 0.1
"""Up to this difference, relative to a cluster file's, a device of the same model has the memory of that file."""


class DeviceMemory(NamedTuple):
    """Memory of one device. The defaults are those of every GPU in `configs/clusters`.

    gib: available to processes, in GiB.  reserved_gib: of it, used by the driver and communicators.
    fragmented: fraction of activations and buffers lost to allocator fragmentation.  fused_norms: a norm is one kernel
    and saves only its input.  stream_pools: the allocator keeps a pool per stream.
    host_gib: of a node's host, in GiB, which its ranks share; 0: not known.  ranks_per_node: 0: all ranks.
    """

    gib: float
    reserved_gib: float = 2.0
    fragmented: float = 0.02
    fused_norms: bool = True
    stream_pools: bool = True
    host_gib: float = 0.0
    ranks_per_node: int = 0

    @property
    def limit_gib(self) -> float:
        """Largest predicted peak, in GiB per rank, of a layout that titan chooses."""
        return MEMORY_LIMIT * self.gib

    def limit_text(self) -> str:
        """The limit and what it follows from, for messages."""
        return f"{self.limit_gib:.4g} GiB, {100 * MEMORY_LIMIT:g} % of the device's {self.gib:.4g} GiB"


@dataclass(frozen=True, kw_only=True)
class Device:
    """`[device]`: one rank's share of the hardware. `[device.peak_tflops]` holds the vendor's dense peaks."""

    name: str = option(REQUIRED, "name of the device")
    memory_gib: float = option(REQUIRED, "memory available to processes", unit="GiB", above=0)
    reserved_gib: float = option(0.0, "part of it used by the driver and communicators", unit="GiB", at_least=0)
    fragmented: float = option(0.0, "fraction of activations and buffers lost to allocator fragmentation", at_least=0)
    stream_pools: bool = option(True, "the allocator keeps a pool of memory per stream, as on GPUs; false on a CPU")
    bandwidth_gb_s: float = option(REQUIRED, "peak memory bandwidth", unit="GB/s", above=0)
    full_speed_ranks: int = option(
        0, "ranks per node that can run at full speed at once; more ranks share that speed; 0: all", at_least=0
    )
    host_memory_gib: float = option(
        0.0, "memory of a node's host, for what is offloaded; 0: not known", unit="GiB", at_least=0
    )
    host_update_gb_s: float = option(
        25.0,
        "host memory bandwidth that each rank's update on the host reaches, all ranks active",
        unit="GB/s",
        above=0,
    )
    host_gb_s: float = option(
        25.0, "bandwidth between one rank's device and the host, per direction, all ranks active", unit="GB/s", above=0
    )
    compute_units: int = option(1, "units (SMs, CUs) that the tiles of one product are distributed over", at_least=1)
    power_w: float = option(0.0, "power under load", unit="W", at_least=0)
    idle_w: float = option(0.0, "power when idle", unit="W", at_least=0)
    price: float = option(0.0, "price per device", unit="currency/hour", at_least=0)


@dataclass(frozen=True, kw_only=True)
class Products:
    """`[kernels.matmul.DTYPE]`: fraction of the peak that matrix products reach, by their shape."""

    efficiency: float = option(0.7, "fraction of the peak that the largest products reach", above=0)
    tile: tuple[int, int] = option((128, 128), "rows and columns of the output tile of one compute unit", at_least=1)
    wave_quantization: float = option(
        1.0, "weight of the idle time of a partly filled last wave of tiles; 0: none, 1: all of it", at_least=0
    )
    k_half: float = option(0.0, "reduction length at which a product reaches half of its efficiency", at_least=0)
    aligned: int = option(1, "sizes that are multiples of this run at full speed", at_least=1)
    unaligned_factor: float = option(1.0, "speed factor for each halving of the alignment below `aligned`", above=0)
    unaligned_16b_factor: float = option(
        1.0, "further speed factor where a dimension is not a multiple of 16 bytes", above=0
    )
    small_batch_max: int = option(
        0, "batched products of at most this many matrices run at small_batch_factor; 0: none", at_least=0
    )
    small_batch_dims: tuple[int, int] = option(
        (1, 1_000_000), "only if the smaller of reduction and columns lies in this range (gaps in library heuristics)"
    )
    small_batch_factor: float = option(1.0, "speed factor of such batches", above=0)
    points: tuple[str, ...] = option((), 'measured "FLOPs TFLOP/s" pairs; they replace all keys above')

    def curve(self) -> list[tuple[float, float]]:
        """The points as (FLOPs, FLOP/s), sorted by FLOPs.

        Raises:
            ValueError: a point is not two numbers.
        """
        pairs = [point.split() for point in self.points]
        return sorted((float(flops), float(tflops) * 1e12) for flops, tflops in pairs)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """`[kernels]`: fractions of a device's peaks that kernels reach, and fixed overheads per operation."""

    attention_forward: float = option(
        0.3, "fraction of the peak that attention reaches in forward, counting needed FLOPs only", above=0
    )
    attention_backward: float = option(0.25, "fraction of the peak that attention reaches in backward", above=0)
    attention_half: float = option(
        0.0, "features per head at which attention reaches half of these fractions; 0: all for any head", at_least=0
    )
    causal: bool = option(True, "attention kernels skip masked positions")
    bandwidth_efficiency: float = option(
        0.8, "fraction of the memory bandwidth that elementwise operations reach", above=0
    )
    update_bandwidth_efficiency: float = option(
        0.0, "fraction of the memory bandwidth that the optimizer reaches; 0: bandwidth_efficiency", at_least=0
    )
    tp_overhead_us: float = option(
        0.0, "overhead of each tensor-parallel collective beyond the transfer", unit="us", at_least=0
    )
    fsdp_overhead_us: float = option(
        0.0, "overhead of each FSDP all-gather and reduce-scatter beyond the transfer", unit="us", at_least=0
    )
    launch_us: float = option(0.0, "minimum time of each operation (kernel launch)", unit="us", at_least=0)
    fused_traffic_factor: float = option(
        0.6, "memory traffic of elementwise operations after torch.compile, as a fraction of eager", above=0
    )
    fused_norms: bool = option(True, "a norm is one kernel and saves only its input")
    overlap_slowdown: float = option(
        0.0, "fraction of the overlapped communication time that computation is slowed down by", at_least=0
    )


@dataclass(frozen=True, kw_only=True)
class Link:
    """One of `[[links]]`: a level of the network. Bandwidth is per rank and direction, with all ranks active."""

    name: str = option(REQUIRED, "name of the link")
    ranks: int = option(0, "ranks that this level connects; 0: any number", at_least=0)
    bandwidth_gb_s: float = option(REQUIRED, "bandwidth per rank and direction", unit="GB/s", above=0)
    latency_us: float = option(0.0, "latency of one message", unit="us", at_least=0)
    efficiency: float = option(1.0, "fraction of the bandwidth that collectives reach", above=0)
    p2p_efficiency: float = option(1.0, "fraction of the bandwidth that a send between two ranks reaches", above=0)


@dataclass(frozen=True, kw_only=True)
class Sites:
    """`[between_sites]`: a level above the last of `[[links]]`, which then connects the nodes of one site."""

    nodes_per_site: int = option(REQUIRED, "nodes of a site", at_least=1)
    bandwidth_gbit_s: float = option(
        REQUIRED, "bandwidth of a site per direction, which its ranks share", unit="Gbit/s", above=0
    )
    latency_ms: float = option(0.0, "latency of one message", unit="ms", at_least=0)

    def above(self, links: Sequence[Link]) -> tuple[Link, ...]:
        """These links, and the level between sites."""
        ranks = links[0].ranks * self.nodes_per_site
        outer = Link(
            name="between sites", bandwidth_gb_s=self.bandwidth_gbit_s / 8 / ranks, latency_us=1e3 * self.latency_ms
        )
        return (*links[:-1], replace(links[-1], ranks=ranks), outer)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A parsed cluster file.

    source: where the figures are from.  peak_tflops: dense TFLOP/s by dtype.  products: by dtype.  links: from inner to
    outer; the last connects any number of ranks.  place: the file, for messages.
    """

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
        """Ranks that the innermost link connects; 0: any number."""
        return self.links[0].ranks if self.links else 0

    @property
    def memory(self) -> DeviceMemory:
        """The memory of one device."""
        device = self.device
        return DeviceMemory(
            device.memory_gib,
            device.reserved_gib,
            device.fragmented,
            self.kernels.fused_norms,
            device.stream_pools,
            device.host_memory_gib,
            self.ranks_per_node,
        )

    def peak(self, dtype: str) -> float:
        """Dense peak of a dtype ("bfloat16") in FLOP/s.

        Raises:
            ConfigError: the file has no peak for this dtype.
        """
        if dtype not in self.peak_tflops:
            what = f"[device.peak_tflops] has no {dtype} (it has {', '.join(self.peak_tflops)})"
            raise ConfigError(f"{what}; change the job's dtype, or choose another cluster", self.place)
        return self.peak_tflops[dtype] * 1e12


def names() -> list[str]:
    """Names of the cluster files that come with titan, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def of_device(device: str, memory_gib: float) -> str:
    """Name of the cluster file that comes with titan for a device, as PyTorch names it; empty: there is none.

    Devices are told apart by model and memory. Of several files, the one with the shortest name is the plain one.
    """
    for name in sorted(names(), key=lambda name: (len(name), name)):
        own = load(name).device
        if re.split("[- ]", own.name)[0] in device and abs(memory_gib / own.memory_gib - 1) < SAME_MEMORY:
            return name
    return ""


def load(name: str) -> Cluster:
    """Read a cluster file, or the one of that name that comes with titan.

    Raises:
        ConfigError: no such file, or the file has errors; lists all of them.
    """
    return from_table(*_read(name, "--cluster"))


def _read(name: str, asked: str) -> tuple[dict[str, Any], str]:
    """(table, file) of a cluster by its name or file. asked: where the name stands, for messages."""
    path = next((path for path in (expanded(name, asked), FOLDER / f"{name}.toml") if path.is_file()), None)
    if path is None:
        raise ConfigError(f"{name}: no such file or cluster{did_you_mean(name, names())}", asked)
    return read_toml(path), str(path)


def _over(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """A table over another: tables merge, any other value replaces."""
    merged = dict(base)
    for key, value in table.items():
        under = base.get(key)
        merged[key] = _over(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged


def from_table(table: Mapping[str, Any], place: str) -> Cluster:
    """The cluster of a parsed TOML; `place` is the file's name in messages.

    Raises:
        ConfigError: the table has errors; lists all of them.
    """
    reader = _Reader(place)
    if "base" in table:
        base, _ = _read(str(table["base"]), f"{place}: base")
        if "base" in base:
            raise ConfigError(f"base = {table['base']!r}: has a base itself; name that one", place)
        table = _over(base, {key: value for key, value in table.items() if key != "base"})
    known = ("name", "source", "device", "kernels", "links", "between_sites")
    for key in table:
        if key not in known:
            reader.faults.append(ConfigIssue(place, f"{key}: unknown key{did_you_mean(key, known)}"))
    device, peaks = dict(table.get("device", {})), {}
    peaks = reader.numbers(device.pop("peak_tflops", {}), "device.peak_tflops")
    kernels = dict(table.get("kernels", {}))
    products = {d: reader.parse(Products, t, f"kernels.matmul.{d}") for d, t in kernels.pop("matmul", {}).items()}
    links = [reader.parse(Link, link, f"links.{i}") for i, link in enumerate(table.get("links", ()))]
    parsed = reader.parse(Device, device, "device"), reader.parse(Kernels, kernels, "kernels")
    if "between_sites" in table:
        sites = reader.parse(Sites, table["between_sites"], "between_sites")
        if not reader.faults and (len(links) < 2 or not links[0].ranks):
            what = "needs two [[links]], the first with the ranks of a node; add them"
            reader.faults.append(ConfigIssue(place, f"[between_sites] {what}"))
        links = links if reader.faults else [*sites.above(links)]
    if reader.faults:
        raise ConfigError(reader.faults)
    return Cluster(
        name=str(table.get("name", Path(place).stem)),
        source=str(table.get("source", "")),
        device=parsed[0],
        peak_tflops=peaks,
        kernels=parsed[1],
        products=products,
        links=tuple(links),
        place=place,
    )


class _Reader:
    """Parses tables; collects their faults."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.faults: list[ConfigIssue] = []

    def parse(self, config: type[C], values: Mapping[str, Any], table: str) -> Any:
        where = Where(table, self.place)
        if not isinstance(values, Mapping):
            self.faults.append(where.fault("", f"= {values!r}: must be a table"))
            return None
        parsed, faults = parse(config, values, where)
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
            self.faults.append(where.fault("", "missing; give TFLOP/s by dtype"))
        return {key: float(value) for key, value in values.items() if isinstance(value, (int, float))}


def spans(ranks: Sequence[int], links: Sequence[Link]) -> int:
    """Index of the innermost link that connects all of these ranks."""
    for number, link in enumerate(links):
        if not link.ranks or len({rank // link.ranks for rank in ranks}) == 1:
            return number
    return len(links) - 1
