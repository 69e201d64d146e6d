"""A model of `street.py` as a run folder: what was trained in stages becomes a WindowTape that every verb takes.

    python research/large/street.py --data DIR --weights FILE --out runs/street --final --seeds 0 --only tape \\
        --scans 32,64,96,96:2500:zoom+classes
    python research/large/street_run.py --state runs/street/street-64-0.pt --path data/gtsdb --out runs/street-windows
    adatape budget runs/street-windows --length 3 --store

Its test figure is that of the package's own code. Weights are stored in half precision. The last line sets a floor, so
that the recipe's validation scenes have three windows on average; they are training scenes of the stages.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from large_tables import WIDE
from scenes import CATEGORIES
from street import ScanPlan
from torch import Tensor

from adatape.config import Experiment, ImageModel
from adatape.data_config import Scenes
from adatape.evaluate.cost import cost
from adatape.macs import total
from adatape.models.windows import WindowTape
from adatape.recipes.scenes import scenes
from adatape.train.evaluate import score_run
from adatape.train.folder import RESULT, WEIGHTS, load_run, prepare, write
from adatape.train.identity import identity
from adatape.train.run import plain
from adatape.train.task import build_for
from adatape.train.weights import write_weights
from adatape.validation import finite

SHUT = -20.0  # logit of a view that the model does not have


def package_weights(model: WindowTape, state: dict[str, dict[str, Tensor]], plan: str) -> dict[str, Tensor]:
    """The stages' weights by the package's names; tokens and places are 0, since windows join after all blocks."""
    found = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    found |= {f"vit.{name}": value for name, value in state["vit"].items()}
    found |= {f"head.{name}": value for name, value in state["head"].items()}
    found |= {f"scan.{name}": value for name, value in state[plan].items() if not name.startswith("guess")}
    found["head.norm.weight"] = torch.ones_like(found["head.norm.weight"])
    found["vit.head.bias"] = torch.full_like(found["vit.head.bias"], SHUT)
    return {name: value.half() if value.is_floating_point() else value for name, value in found.items()}


def experiment_of(path: str, reads: int, scan_width: int) -> Experiment:
    """Recipe `scenes`, with the categories in the stages' order and no weights to start from."""
    found = scenes(path, reads=reads, scan_width=scan_width)
    assert isinstance(found.data, Scenes)
    assert isinstance(found.model, ImageModel)
    return replace(found, data=replace(found.data, classes=CATEGORIES), model=replace(found.model, pretrained=None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--path", required=True, help="folder that gtsdb_folder.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plan", default=WIDE, help="the scan, as ScanPlan reads it")
    parser.add_argument("--reads", type=int, default=8)
    args = parser.parse_args()
    plan, state = ScanPlan.parse(args.plan), torch.load(args.state, weights_only=True)
    if args.plan not in state:
        parser.error(f"plan is {args.plan}; {args.state} has {', '.join(state.keys() - {'vit', 'head'})}")
    experiment = experiment_of(args.path, args.reads, plan.widths[0])
    model = build_for(experiment)
    assert isinstance(model, WindowTape)
    weights = package_weights(model, state, args.plan)
    prepare(args.out, experiment, "cpu")
    write_weights(args.out / WEIGHTS, weights, identity(experiment).to_json())
    experiment, model = load_run(args.out)
    whole = total(cost(model))
    result = {**plain(score_run(experiment, model, torch.device("cpu"))), "steps": 0, "seconds": 0.0}
    result |= {"parameters": whole.parameters, "gflops": whole.macs / 1e9}
    write(args.out / RESULT, finite(result))
    print(result)


if __name__ == "__main__":
    main()
