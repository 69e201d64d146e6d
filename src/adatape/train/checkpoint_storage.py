"""Reader and writer for torch.distributed.checkpoint (DCP) that execute no code and raise one-line errors."""

from __future__ import annotations

import dataclasses
import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

DCP = "torch.distributed.checkpoint"
METADATA_PARTS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks up one of torch's layouts by name
    (f"{DCP}.filesystem", "_StorageInfo"),
    *((f"{DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((f"{DCP}.metadata", name) for name in ("ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata")),
}


class DamagedCheckpoint(ValueError):  # noqa: N818
    """A checkpoint whose files are missing, changed or not readable."""


class Writer(dcp.FileSystemWriter):
    """DCP's writer, but it raises the disk's error and stores no path of this machine."""

    def write_data(self, *args: Any, **options: Any) -> Any:
        try:
            return super().write_data(*args, **options)
        except RuntimeError as error:
            # torch.save's error hides the disk's, and only the outer one is sent to other processes.
            reason = error.__context__
            raise reason if isinstance(reason, OSError) else error from None

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class Reader(dcp.FileSystemReader):
    """DCP's reader, but it unpickles only the classes of METADATA_PARTS."""

    def __init__(self, path: Path, files: dict[str, Any]) -> None:
        super().__init__(path)
        self.files = files

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
            tensors, places = metadata.state_dict_metadata.values(), metadata.storage_data.values()
            sound = all(type(part) is TensorStorageMetadata for part in tensors)
            strange = {place.relative_path for place in places} - set(self.files)
        except Exception as error:  # a malicious pickle can raise anything
            raise DamagedCheckpoint(f"{file} is not the metadata of a checkpoint: {error}") from error
        if not sound or strange:
            raise DamagedCheckpoint(f"{file} refers to {sorted(strange) or 'pickles'}; only listed tensors are read")
        metadata.storage_meta = StorageMeta()
        return metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        """Reads one file at a time, so that errors name it; DCP calls torch.load with weights_only."""
        place = {item: self.storage_data[item.storage_index].relative_path for item in plan.items}
        for name in sorted(set(place.values())):
            items = [item for item in plan.items if place[item] == name]
            try:
                super().read_data(dataclasses.replace(plan, items=items), planner)
            except Exception as error:
                reason = str(error).partition("\n")[0]
                raise DamagedCheckpoint(f"{self.path}/{name} cannot be read as tensors: {reason}") from error
        return super().read_data(dataclasses.replace(plan, items=[]), planner)


class LoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: dcp.planner.ReadItem, value: io.BytesIO) -> None:  # noqa: ARG002
        raise DamagedCheckpoint(f"{read_item.dest_index.fqn} is a pickle; only tensors are read")


class _MetadataUnpickler(pickle._Unpickler):
    """Unpickles only METADATA_PARTS; Python's version, since the C one does not allow overriding BUILD."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in METADATA_PARTS or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not permitted in a checkpoint")

    def load_build(self) -> None:
        if callable(self.stack[-2]):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it would modify a class")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raises the cause of DCP's CheckpointException, which is a BaseException with every rank's traceback."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except dcp.CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            telling = [cause for cause in causes if isinstance(cause, OSError | DamagedCheckpoint)]
            raise (telling or causes)[0] from error
