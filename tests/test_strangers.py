"""Files from someone else: no run folder, config, release or image can cause downloads or writes.

Every hostile file refers to a server that counts connections and to a folder that is checked.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
from PIL import EpsImagePlugin, Image
from safetensors.torch import save_file
from small_runs import contents, tiny

import adatape.models  # noqa: F401  registers the names
from adatape.cli import main
from adatape.config import ImageModel
from adatape.data.decode import BrokenImage, decode
from adatape.data_config import Images
from adatape.models.options import check_options, check_wrap
from adatape.recipes import RECIPES
from adatape.serve.served import load_served
from adatape.train.files import atomic_write
from adatape.train.folder import RESULT, WEIGHTS, load_run, prepare, write
from adatape.train.task import build_for
from adatape.train.weights import write_weights

Config = dict[str, Any]


class Listener:
    """Answers every request with a small file, and counts them."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.connections = 0
        self.thread = threading.Thread(target=self._answer, daemon=True)
        self.thread.start()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:  # closed
                return
            self.connections += 1
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 14\r\n\r\nprint('owned')")

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join(5)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class World(NamedTuple):
    """A server and a folder that hostile files try to reach."""

    url: str
    outside: Path
    listener: Listener

    def seen(self) -> tuple[int, dict[str, bytes], list[str]]:
        return self.listener.connections, contents(self.outside), sorted(os.listdir(self.outside))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    from torchvision.datasets import CIFAR10

    listener, outside = Listener(), tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "weights.pt").write_bytes(pickle.dumps(Bomb(outside / "unpickled")))
    (outside / "log").write_text('{"step": 1}\nmine\n')
    save_file({"w": torch.zeros(2)}, outside / "weights.safetensors")
    monkeypatch.setattr(CIFAR10, "url", f"{listener.url}/cifar.tar.gz")
    monkeypatch.chdir(tmp_path)
    yield World(listener.url, outside, listener)
    listener.close()


@pytest.fixture(scope="session")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with untrained weights."""
    folder, experiment = tmp_path_factory.mktemp("good") / "run", tiny()
    prepare(folder, experiment, "cpu")
    write_weights(folder / WEIGHTS, build_for(experiment).state_dict())
    write(folder / RESULT, {"accuracy": 0.5, "steps": 12})
    return folder


@pytest.fixture
def run(good_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_run, tmp_path / "downloaded"))


def change(run: Path, part: str, **fields: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    config[part] |= fields
    (run / "config.json").write_text(json.dumps(config))


def options(run: Path) -> Config:
    return json.loads((run / "config.json").read_text())["model"]["options"]


def of_run(run: Path) -> list[list[str]]:
    """Every verb that reads a run folder and builds its model."""
    return [
        ["eval", str(run)],
        ["eval", str(run), "--budgets", "0,1"],
        ["budget", str(run), "--gflops", "1"],
        ["fewshot", str(run), "--on", "digits", "--shots", "1"],
        ["figures", str(run), "--samples", "20"],
        ["export", str(run), "--to", "torch"],
        ["release", str(run), "--to", "released"],
    ]


def of_file(run: Path) -> list[list[str]]:
    """Every verb that trains from a file."""
    return [
        ["train", str(run)],
        ["train", str(run / "config.json"), "--out", "replayed"],
        ["sweep", str(run / "config.json"), "--over", "seed=0,1", "--out", "swept"],
    ]


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--device", "cpu"] if arguments[0] not in ("export", "release", "report") else arguments)
    lines = capsys.readouterr().err.splitlines()
    assert (stop.value.code, len(lines)) == (2, 1), (arguments, lines)
    return lines[0]


def check_refused(
    verbs: list[list[str]], says: str, run: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    before, folder = world.seen(), contents(run)
    for arguments in verbs:
        assert says in refusal(arguments, capsys), arguments
        assert world.seen() == before, arguments
    assert contents(run) == folder
    assert not [name for name in ("replayed", "released", "swept") if Path(name).exists()]


HOSTILE_OPTIONS: dict[str, Callable[[World], Config]] = {
    "a URL, kept where Python finds it": lambda world: {
        "pretrained": True,
        "pretrained_cfg_overlay": {"url": f"{world.url}/evil.py"},
        "cache_dir": str(world.outside),
    },
    "a pickle": lambda world: {
        "pretrained": True,
        "pretrained_cfg_overlay": {"file": f"{world.outside}/weights.pt"},
    },
    "tensors of its own": lambda _: {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": {}}},
    "a hub": lambda _: {"pretrained_cfg": {"hf_hub_id": "evil/model"}},
    "a checkpoint": lambda world: {"checkpoint_path": f"{world.outside}/weights.safetensors"},
    "a class": lambda _: {"block_fn": "os.system"},
    "a function": lambda _: {"embed_layer": "os.system"},
    "a switch of timm's": lambda _: {"scriptable": True},
}


@pytest.mark.parametrize("kind", HOSTILE_OPTIONS)
def test_options_that_do_not_shape_a_model_are_refused_by_every_verb(
    kind: str, world: World, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = HOSTILE_OPTIONS[kind](world)
    change(run, "model", options={**options(run), **given})
    (run / RESULT).unlink()  # a run that is to go on
    says = f"model.options.{next(iter(given))} is"
    every = kind in list(HOSTILE_OPTIONS)[:2]  # the others show that it is refused, not again where
    check_refused(of_run(run) + of_file(run) if every else of_run(run)[:1] + of_file(run)[:1], says, run, world, capsys)
    with pytest.raises(ValueError, match=says):
        load_served(run)
    assert world.listener.connections == 0


def test_options_from_the_command_line_are_held_to_the_same_list(
    world: World, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = world.outside / "weights.safetensors"
    given = f"checkpoint_path={elsewhere}"
    trained = ["train", "digits", "--out", "replayed", "--set", f"model.options.{given}"]
    swept = ["sweep", "digits", "--out", "swept", "--over", f"model.options.{given}"]
    benched = ["bench", f"vit_tiny_patch16_224:{given}", "--batch", "1"]
    check_refused([trained, swept, benched], f"checkpoint_path is '{str(elsewhere)[:5]}", run, world, capsys)


@pytest.mark.parametrize("name", ["local-dir:outside/folder", "hf-hub:evil/model", "vit_tiny_patch16_224/../x"])
def test_a_model_is_named_by_timms_registry_alone(
    name: str, world: World, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run, "model", name=name)
    check_refused(of_run(run)[:1], f"model.name is '{name}'", run, world, capsys)
    change(run, "model", name="adatape", options={"backbone": name})
    check_refused(of_run(run)[:1], f"backbone is '{name}'", run, world, capsys)


def test_a_wrapper_takes_options_that_shape_it_alone(
    world: World, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = str(world.outside / "weights.safetensors")
    (run / RESULT).unlink()
    for given in ({"checkpoint_path": elsewhere}, {"pretrained": True}, {"reading": {"steps": 3}}):
        change(run, "model", name="vit_tiny_patch16_224", options={"depth": 1}, wrap=given)
        verbs = [of_run(run)[0], of_file(run)[1]]
        check_refused(verbs, f"model.wrap.{next(iter(given))} is", run, world, capsys)
        shape = {"backbone": "vit_tiny_patch16_224", "depth": 1}
        change(run, "model", name="adatape", options={**shape, **given}, wrap=None)
        check_refused(verbs, f"model.options.{next(iter(given))} is", run, world, capsys)


def test_a_release_reads_no_other_weights_than_its_own(world: World, tmp_path: Path) -> None:
    shape = {"backbone": "vit_tiny_patch16_224", "img_size": 32, "depth": 2, "num_classes": 3, "steps": 2, "merge": 2}
    twin = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
    elsewhere = world.outside / "twin.safetensors"
    save_file(twin.state_dict(), elsewhere)
    before = world.seen()
    for given in ({"checkpoint_path": str(elsewhere)}, {"scriptable": True}):
        folder = tmp_path / next(iter(given))
        folder.mkdir()
        settings = {"url": f"{world.url}/evil.py", "file": str(elsewhere), "num_classes": 3, "input_size": [3, 32, 32]}
        config = {"architecture": "adatape", "pretrained_cfg": settings, "model_args": {**shape, **given}}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(timm.create_model("adatape", **shape).state_dict(), folder / "model.safetensors")
        with pytest.raises(ValueError, match=f"{next(iter(given))} is .*; the options of a backbone are img_size"):
            timm.create_model(f"local-dir:{folder}", pretrained=True)
        config["model_args"] = shape
        (folder / "config.json").write_text(json.dumps(config))
        timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert world.seen() == before


URLS = ["{url}/{{split}}-{{0..1}}.tar", "htt{{p,p}}://{rest}/{{split}}.tar", "{outside}/t.tar | {url}/test.tar"]


@pytest.mark.parametrize("path", [*URLS, "pipe:mkdir {outside}/piped | pipe:mkdir {outside}/piped"])
def test_shards_that_a_file_names_lie_on_this_disk(
    path: str, world: World, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world.outside / "t.tar").write_bytes(b"")
    named = path.format(url=world.url, rest=world.url[7:], outside=world.outside)
    change(run, "data", source="shards", path=named, classes=10, size=8)
    change(run, "model", options={**options(run), "in_chans": 3})
    (run / RESULT).unlink()
    weights = build_for(tiny(data__source="shards", data__classes=10)).state_dict()
    write_weights(run / WEIGHTS, weights)
    reading = [verb for verb in of_run(run) if verb[0] in ("eval", "budget", "figures")]
    check_refused(reading + of_file(run), "a file may name local shards only", run, world, capsys)
    assert load_served(run).images is None
    assert world.listener.connections == 0


def test_a_set_that_a_file_names_is_not_downloaded(world: World, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(run, "data", source="cifar10", path=str(world.outside / "cifar"), download=True)
    (run / RESULT).unlink()
    check_refused(of_run(run) + of_file(run), "download is true only in a file", run, world, capsys)
    assert load_served(run).images is None
    assert world.listener.connections == 0


def test_archives_that_a_file_names_are_not_unpacked(world: World, run: Path, capsys: Any) -> None:
    (world.outside / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(b"")
    (world.outside / "train").mkdir()
    change(run, "data", source="imagenet", path=str(world.outside))
    check_refused(of_run(run)[:1], "contains archives to unpack", run, world, capsys)


@pytest.mark.parametrize("weights", ["hub", "outside/weights.safetensors", "outside/weights.pt"])
def test_training_from_a_file_reads_no_weights_from_elsewhere(
    weights: str, world: World, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run, "model", pretrained=weights)
    result = (run / RESULT).read_text()
    (run / RESULT).unlink()
    check_refused(of_file(run), f"model.pretrained is '{weights}'; a file may not", run, world, capsys)
    (run / RESULT).write_text(result)
    load_run(run)  # which needs none
    load_served(run)


LINKS = ["metrics.jsonl", "tensorboard", "figures", "config.json.partial", "model.pt2", str(WEIGHTS), RESULT]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_that_leads_out_of_a_run_folder_is_refused_by_every_verb(
    name: str, world: World, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / RESULT).rename(world.outside / RESULT)
    (run / WEIGHTS).rename(world.outside / "model.safetensors")
    for kept, place in ((RESULT, RESULT), (str(WEIGHTS), "model.safetensors")):
        if kept != name:
            shutil.copy(world.outside / place, run / kept)
    targets = {"tensorboard": "folder", "figures": "folder", str(WEIGHTS): "model.safetensors", RESULT: RESULT}
    target = world.outside / targets.get(name, "absent" if name == "model.pt2" else "log")
    (run / name).symlink_to(target)
    verbs = [*of_run(run), of_file(run)[0], ["report", str(run)]]
    check_refused(verbs, f"{name} links to {target}, which is outside the run folder", run, world, capsys)
    with pytest.raises(ValueError, match="outside the run folder"):
        load_served(run)


def test_a_link_within_a_run_folder_is_accepted(world: World, run: Path) -> None:
    (run / "latest").symlink_to("checkpoints")
    (run / WEIGHTS).rename(run / "weights.safetensors")
    (run / WEIGHTS).symlink_to(Path("..") / "weights.safetensors")
    Path("alias").symlink_to(run)
    load_run(Path("alias"))
    load_served(run)
    assert world.listener.connections == 0


def test_a_file_is_written_beside_a_link_not_through_it(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "x.json.partial").symlink_to(tmp_path / "mine")
    with atomic_write(tmp_path / "x.json") as partial:
        partial.write_text("new")
    assert ((tmp_path / "mine").read_text(), (tmp_path / "x.json").read_text()) == ("mine", "new")


def test_what_the_user_says_is_done(world: World, run: Path) -> None:
    """With the user's consent the server is asked, which shows that the other tests refuse something."""
    change(run, "data", source="cifar10", path=str(world.outside / "cifar"), download=True)
    (run / RESULT).unlink()
    train = ["train", str(run / "config.json"), "--out", "replayed"]
    verbs = [[*train, "--trust"], [*train, "--set", "data.download=true"], ["eval", str(run), "--trust"]]
    for verb in verbs:
        shutil.rmtree(world.outside / "cifar", ignore_errors=True)
        asked = world.listener.connections
        with pytest.raises(SystemExit):  # what comes is no CIFAR
            main(verb)
        assert world.listener.connections > asked
    change(run, "data", source="shards", path=f"{world.url}/train.tar | {world.url}/test.tar", classes=10)
    asked = world.listener.connections
    with pytest.raises(SystemExit):
        main([*train, "--trust"])
    assert world.listener.connections > asked


def test_saying_one_field_permits_no_other(world: World, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(run, "model", pretrained=str(world.outside / "weights.safetensors"))
    change(run, "data", source="cifar10", path=str(world.outside / "cifar"), download=True)
    train = ["train", str(run / "config.json"), "--out", "replayed"]
    before = world.seen()
    for words in (["--set", "data.path=outside/folder"], ["--set", "model.pretrained=null"], ["--set", "seed=1"]):
        assert "download is true only in a file" in refusal([*train, *words], capsys)
    change(run, "data", source="digits", path=None, download=False)
    assert "a file may not load other weights" in refusal([*train, "--set", "data.download=true"], capsys)
    assert world.seen() == before
    main([*train, "--set", f"model.pretrained={run / WEIGHTS}", "--set", "optimizer.steps=1", "--device", "cpu"])


def test_a_run_goes_on_without_the_weights_that_it_began_with(tmp_path: Path, monkeypatch: Any) -> None:
    experiment = tiny(steps=6, engine__checkpoint_every=3)
    save_file(build_for(experiment).state_dict(), tmp_path / "start.safetensors")
    fields = {"steps": 6, "engine__checkpoint_every": 3, "model__pretrained": str(tmp_path / "start.safetensors")}
    prepare(tmp_path / "config", tiny(**fields), "cpu")
    monkeypatch.chdir(tmp_path)
    main(["train", "config/config.json", "--out", "run", "--device", "cpu", "--trust"])
    (tmp_path / "run" / RESULT).unlink()
    (tmp_path / "start.safetensors").unlink()
    main(["train", "run", "--device", "cpu"])
    assert (tmp_path / "run" / RESULT).is_file()


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not name.startswith("parity")])
def test_every_recipes_options_shape_its_model(recipe: str) -> None:
    given = {"path": "data"} if recipe in ("images", "finetune", "scenes", "megapixel") else {}
    systems = [{}] if recipe in ("finetune", "plainvit", "deit") else [{"system": s} for s in ("adatape", "ut", "avit")]
    for system in systems:
        model = RECIPES[recipe](**given, **system).model
        assert isinstance(model, ImageModel)
        check_options("model.options", model.options)
        check_wrap("model.wrap", model.wrap or {})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"patch_size": [4, 4], "norm_layer": "rmsnorm", "merge": None, "threshold": 2}, None),
        ({"patch_size": [4]}, r"x\.patch_size is \[4\]; it must be a whole number or 2 of a whole number"),
        ({"depth": True}, r"x\.depth is True; it must be a whole number"),
        ({"depth": None}, r"x\.depth is None; it must be a whole number"),
        ({"norm_layer": ["os"]}, r"x\.norm_layer is \['os'\]; it must be text or null"),
        ({"bank": "both"}, r"x\.bank is 'both'; it must be 'input', 'learn' or 'windows'"),
        (
            {"device": "cpu"},
            r"x\.device is 'cpu'; device is not a permitted option, use one of: above, act_layer, att",
        ),
        ({"vit": {}}, r"x\.vit is \{\}; vit is not a permitted option"),
    ],
)
def test_an_option_is_allowed_by_name_and_by_type(given: Config, says: str | None) -> None:
    if says is None:
        return check_options("x", given)
    with pytest.raises(ValueError, match=says):
        check_options("x", given)
    return None


def test_an_image_starts_no_program(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow runs Ghostscript for EPS with any file name."""
    started: list[Any] = []
    monkeypatch.setattr(
        EpsImagePlugin, "Ghostscript", lambda *given, **_: started.append(given) or Image.new("L", (1, 1)).im
    )
    picture = tmp_path / "picture.png"
    Image.new("RGB", (8, 8)).save(picture, "EPS")
    with pytest.raises(BrokenImage, match="not an image that Pillow can identify"):
        decode(picture.read_bytes(), "picture.png")
    assert not started
    assert world.listener.connections == 0


def test_records_that_a_file_gives_are_marked_and_those_of_a_recipe_are_not(run: Path) -> None:
    experiment, _ = load_run(run)
    assert (experiment.data.may_fetch, experiment.model.may_fetch) == (False, False)  # type: ignore[union-attr]
    experiment, _ = load_run(run, trust=True)
    assert (experiment.data.may_fetch, experiment.model.may_fetch) == (True, True)  # type: ignore[union-attr]
    assert Images().may_fetch
    assert "may_fetch" not in (run / "config.json").read_text()
