"""Tensors to and from files, with torch.distributed.checkpoint (DCP). Imported when first used: it takes time."""

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
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan.errors import CheckpointError


def write(
    path: Path, tensors: Mapping[str, Tensor], local: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Write tensors into a folder, with all ranks of the group; data and metadata are on disk when it returns.

    tensors: plain or DTensor, for shape and placement; one that several ranks hold alike is written once.
    local: this rank's values of each.

    Raises:
        OSError: what the file system said, on any rank.
        CheckpointError: anything else.
    """
    with _ordinary_errors():
        save(
            dict(tensors),
            storage_writer=_Writer(path),
            planner=_LocalValues(local),
            process_group=group,
            no_dist=group is None,
        )


def read(path: Path, into: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill tensors (plain or DTensor, in place) from a checkpoint, with all ranks of the group; each reads its shards.

    Raises:
        CheckpointError: it cannot be read, on some rank.
    """
    try:
        with _ordinary_errors():
            load(
                dict(into),
                storage_reader=FileSystemReader(path),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=group is None,
            )
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error


def read_metadata(path: Path) -> Metadata:
    """DCP's metadata of a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:
        raise CheckpointError(f"the metadata of {path} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"the metadata of {path} is a {type(metadata).__name__}")
    return metadata


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Name -> shape and type of every tensor of a checkpoint."""
    stored = metadata.state_dict_metadata
    return {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def absent_files(path: Path) -> list[str]:
    """Data files that a checkpoint's metadata speaks of and that are not there."""
    named = {str(entry.relative_path) for entry in (read_metadata(path).storage_data or {}).values()}
    return sorted(name for name in named if not (path / name).is_file())


class _LocalValues(DefaultSavePlanner):
    """Plans by the tensors as they stand in the run; writes the values of a snapshot."""

    def __init__(self, local: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._local = local

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._local[index.fqn]


class _Writer(FileSystemWriter):
    """Keeps the file system's own words: torch.save wraps them, and DCP sends the outermost error only."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with _os_error_first():
            return super().write_data(plan, planner)


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
        raise CheckpointError(f"rank {rank}: {type(cause).__name__}: {cause}") from error
