"""Writes and reads tensors with torch.distributed.checkpoint (DCP). Imported at first use: DCP is slow to import."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan.checkpoint.disk import manifest
from titan.checkpoint.disk import metadata as stored
from titan.checkpoint.disk.payload import Window, read_tensor
from titan.checkpoint.disk.plain import size_of
from titan.errors import CheckpointError


def write(
    path: Path, tensors: Mapping[str, Tensor], local: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> list[str]:
    """Write tensors into a folder, with all ranks of the group; data and metadata are on disk when it returns.

    tensors: plain or DTensor, for shape and placement; one that several ranks hold alike is written once.
    local: this rank's values of each. Where `tensors` are on the meta device, it may make them as they are asked for:
        one at a time is then in memory.

    Returns:
        Names of the data files this rank wrote.

    Raises:
        OSError: what the file system said, on any rank.
        CheckpointError: anything else.
    """
    # DCP keeps the values of a file until all of it is written, so values made one by one need a file each.
    one_by_one = any(tensor.is_meta for tensor in tensors.values())
    writer = _Writer(path, single_file_per_rank=not one_by_one)
    with _ordinary_errors():
        save(
            dict(tensors),
            storage_writer=writer,
            planner=_LocalValues(local),
            process_group=group,
            no_dist=group is None,
        )
    return writer.written


def read(
    path: Path, into: Mapping[str, Tensor], group: dist.ProcessGroup | None, metadata: Metadata | None = None
) -> None:
    """Fill tensors (plain or DTensor, in place) from a checkpoint, with all ranks of the group; each reads its shards.

    metadata: the checkpoint's, where it has been read already.

    Raises:
        CheckpointError: it cannot be read, on some rank.
    """
    reader = _Reader(path, metadata or read_metadata(path))
    try:
        with _ordinary_errors():
            load(
                dict(into),
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=group is None,
            )
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error


def read_metadata(path: Path) -> Metadata:
    """DCP's metadata of a checkpoint, held against the sizes in its manifest.

    Raises:
        CheckpointError: it cannot be read, or is not what a writer of checkpoints leaves.
    """
    return stored.read(path, manifest.read(path))


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Name -> shape and type of every tensor of a checkpoint."""
    entries = metadata.state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


class _Reader(FileSystemReader):
    """Reads neither metadata nor data by unpickling."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            file = Path(self.path) / name
            size_of(file)
            with file.open("rb") as stream:
                for item in items:
                    info = self.storage_data[item.storage_index]
                    self._read_item(Window(stream, info.offset, info.length), item, planner, name)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, window: Window, item: ReadItem, planner: LoadPlanner, file: str) -> None:
        name, entry = item.storage_index.fqn, self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = next(chunk for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)
        values = read_tensor(window, entry.properties.dtype, chunk.sizes, f"{name} in {file}")
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(values)
        planner.commit_tensor(item, target)


class _LocalValues(DefaultSavePlanner):
    """Plans by the tensors as they stand in the run; writes the values of a snapshot."""

    def __init__(self, local: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._local = local

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._local[index.fqn]


class _Writer(FileSystemWriter):
    """Keeps the file system's own words: torch.save wraps them, and DCP sends the outermost error only.

    written: names of this rank's data files.
    """

    written: list[str]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with _os_error_first():
            results = super().write_data(plan, planner)
        self.written = sorted(file.name for file in Path(self.path).glob(f"{plan.storage_data.prefix}*"))
        return results

    def storage_meta(self) -> StorageMeta | None:
        """None of DCP's own: it would tell the folder's path to whoever gets the checkpoint."""
        return None


@contextmanager
def _os_error_first() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        below: BaseException | None = error
        while below is not None and not isinstance(below, OSError):
            below = below.__cause__ or below.__context__
        if below is None or below is error:
            raise
        raise OSError(below.errno, below.strerror, below.filename) from error


@contextmanager
def _ordinary_errors() -> Iterator[None]:
    """DCP's own exception is no Exception, and holds one error per rank: the one that says most goes on."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        yield
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        for cause in causes.values():
            if isinstance(cause, OSError):
                raise cause from error
        rank, cause = next(iter(causes.items()))
        if isinstance(cause, CheckpointError):
            raise cause from error
        raise CheckpointError(f"rank {rank}: {type(cause).__name__}: {cause}") from error
