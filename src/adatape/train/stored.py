"""How torch.distributed.checkpoint is read and written here: no code executed, and errors in one line."""

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
    ("torch.serialization", "_get_layout"),  # looks a name up among torch's layouts
    (f"{DCP}.filesystem", "_StorageInfo"),
    *((f"{DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((f"{DCP}.metadata", name) for name in ("ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata")),
}


class DamagedCheckpoint(ValueError):  # noqa: N818  it names a state, as FileNotFound would
    """A checkpoint that is not what was written."""


class Writer(dcp.FileSystemWriter):
    """DCP's, whose failures say what the disk said and whose metadata keeps no path of this machine."""

    def write_data(self, *args: Any, **options: Any) -> Any:
        try:
            return super().write_data(*args, **options)
        except RuntimeError as error:
            # torch.save's own complaint hides the disk's, which another process would then never see.
            reason = error.__context__
            raise reason if isinstance(reason, OSError) else error from None

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class Reader(dcp.FileSystemReader):
    """DCP's, without its free hand in unpickling."""

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
        except Exception as error:  # a hostile pickle may raise anything
            raise DamagedCheckpoint(f"{file} is not the metadata of a checkpoint: {error}") from error
        if not sound or strange:
            raise DamagedCheckpoint(f"{file} refers to {sorted(strange) or 'pickles'}; only listed tensors are read")
        metadata.storage_meta = StorageMeta()
        return metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        """One file at a time, so that an error can name it; torch.load runs with weights_only there."""
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
    """Knows the parts of DCP's metadata and nothing else; Python's own, since C's cannot be told about BUILD."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in METADATA_PARTS or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")

    def load_build(self) -> None:
        if callable(self.stack[-2]):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it would change a class")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


@contextmanager
def plain_errors() -> Iterator[None]:
    """DCP's exception is no Exception and prints every rank's traceback: gives the cause instead."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except dcp.CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            telling = [cause for cause in causes if isinstance(cause, OSError | DamagedCheckpoint)]
            raise (telling or causes)[0] from error
