"""Restrictions on run folders and config files that may come from someone else: only local files are read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path

from adatape.config import Experiment, ImageModel, UntrustedImageModel
from adatape.data_config import Images, UntrustedImages


def untrusted(experiment: Experiment, said: Collection[str] = ()) -> Experiment:
    """Marks a file's experiment so that it may download only what fields in `said`, given on the command line, name.

    Downloads are shards at a URL in data.path, data.download for other sets, and model.pretrained.
    """
    data, model = experiment.data, experiment.model
    if isinstance(data, Images) and not _covers(said, "data.path" if data.source == "shards" else "data.download"):
        data = UntrustedImages(**vars(data))
    if isinstance(model, ImageModel) and not _covers(said, "model.pretrained"):
        model = UntrustedImageModel(**vars(model))
    return dataclasses.replace(experiment, data=data, model=model)


def check_links(folder: Path) -> None:
    """Refuses a run folder with a link that leads out of it, through which other files could be read or written."""
    home = Path(os.path.realpath(folder))
    for place, folders, files in os.walk(folder):
        for path in (Path(place) / name for name in sorted(folders + files)):
            target = Path(os.path.realpath(path))
            if path.is_symlink() and not target.is_relative_to(home):
                raise ValueError(
                    f"{path} links to {target}, which is outside the run folder; "
                    "replace the link by the file, or give --trust if the run is your own"
                )


def _covers(said: Collection[str], field: str) -> bool:
    return any(field == name or field.startswith(f"{name}.") for name in said)
