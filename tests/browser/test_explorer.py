"""The Explorer in a real browser: what a visitor does, and what the page then shows."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import tiny

from adatape.recipes.haystack import haystack
from adatape.train.run import run

DIGITS = Path(__file__).parents[2] / "src" / "adatape" / "serve" / "models" / "digits"
STEPS = 4  # of the stand-in model, as trained
WAIT = 60_000  # milliseconds, after which what hangs has failed


@pytest.fixture
def visit(chromium: Any) -> Iterator[Any]:
    """Opens the page in a context of its own; a script error, or one that the content policy blocks, fails the test."""
    contexts, faults = [], []

    def opened(address: str, width: int = 1200, **options: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 800}, **options)
        context.set_default_timeout(WAIT)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture
def page(visit: Any, image_server: str) -> Any:
    shown = visit(image_server)
    settled(shown)
    return shown


def settled(page: Any, panel: str = "A") -> None:
    page.wait_for_selector(f'[data-panel="{panel}"]:not([aria-busy]) .guess .name:not(:empty)')


def figure(page: Any, name: str, panel: str = "A") -> str:
    return page.locator(f'[data-panel="{panel}"] [data-figure={name}]').inner_text()


def shows(page: Any, name: str, value: str, panel: str = "A") -> None:
    page.locator(f'[data-panel="{panel}"] [data-figure={name}]', has_text=re.compile(f"^{value}$")).wait_for()


def set_steps(page: Any, value: int) -> None:
    page.locator("#steps").fill(str(value))


def upload(page: Any, name: str, content: bytes, panel: str = "A") -> None:
    file = {"name": name, "mimeType": "image/png", "buffer": content}
    page.locator(f'[data-panel="{panel}"] input[type=file]').set_input_files(file)


def overflow(page: Any) -> int:
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_an_example_is_answered_before_anything_is_pressed(page: Any) -> None:
    assert page.locator(".bars li").count() == 5
    assert page.locator("svg .patch").count() == 9
    assert "Stopped after 3 of 4" in page.locator(".halt").inner_text()
    assert page.locator(".tape .blank").count() == 1


def test_the_slider_changes_every_figure(page: Any) -> None:
    names = ["tokens", "made", "gflops", "ms"]
    before = [figure(page, name) for name in names] + [page.locator(".guess .sure").inner_text()]
    set_steps(page, 1)
    shows(page, "tokens", "5")
    after = [figure(page, name) for name in names] + [page.locator(".guess .sure").inner_text()]
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert page.locator("svg .patch").count() == 3


def test_a_budget_of_nothing_reads_nothing(page: Any) -> None:
    set_steps(page, 0)
    shows(page, "tokens", "4")
    assert page.locator("svg .patch").count() == 0
    assert "Nothing is read" in page.locator(".halt").inner_text()


def test_a_higher_threshold_reads_on(page: Any) -> None:
    page.locator("#advanced summary").click()
    page.locator("#own").check()
    page.locator("#threshold").fill("4")
    shows(page, "tokens", "8")
    assert "Read 4 of 4" in page.locator(".halt").inner_text()


def test_a_late_reply_to_an_old_budget_is_dropped_and_the_last_answer_stays_meanwhile(page: Any) -> None:
    held: list[Any] = []
    page.evaluate("AbortController.prototype.abort = () => {}")  # as if the reply were already on its way
    page.route("**/v1/classify", lambda route: route.continue_() if held else held.append(route))
    set_steps(page, 1)
    page.wait_for_selector('[data-panel="A"][aria-busy]')
    assert figure(page, "tokens") == "7"
    set_steps(page, 2)
    shows(page, "tokens", "6")
    with page.expect_response("**/v1/classify") as late:
        held[0].continue_()
    late.value.finished()
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert figure(page, "tokens") == "6"


def test_pointing_at_a_tape_token_shows_the_patches_it_merged(page: Any) -> None:
    page.locator(".tape button").nth(1).hover()
    assert page.locator("svg .patch.on").count() == 3
    assert page.locator('svg .patch.on[data-of="1"]').count() == 3
    assert page.locator("svg .patch.off").count() == 6


def test_the_keyboard_alone_runs_through_everything(page: Any, picture: Any) -> None:
    seven = {"name": "seven.png", "mimeType": "image/png", "buffer": picture(7)}
    page.on("filechooser", lambda chooser: chooser.set_files(seven))  # early: the browser takes a while to listen
    reached = walk(page, "#steps")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    shows(page, "tokens", "6")
    reached += walk(page, "#examples button")
    page.keyboard.press("Enter")
    page.locator("h2", has_text="example 1,").wait_for()
    reached += walk(page, ".drop")
    page.keyboard.press("Enter")
    page.locator("h2", has_text="seven.png").wait_for()
    reached += walk(page, "[data-go='1']")
    page.keyboard.press("Enter")
    assert page.locator('svg .patch.on[data-of="0"]').count() == 3
    reached += walk(page, ".tape button")
    reached += walk(page, "#compare")
    page.keyboard.press("Enter")
    settled(page, "B")
    assert page.evaluate("document.activeElement.matches('[data-panel=B] .drop')")
    assert all(reached), "something took the focus without showing it"


def walk(page: Any, selector: str) -> list[bool]:
    """Tabs until the selector has the focus; gives, for each stop, whether the focus can be seen."""
    visible = []
    for _ in range(60):
        page.keyboard.press("Tab")
        visible.append(page.evaluate(FOCUS_SEEN))
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return visible
    raise AssertionError(f"{selector} cannot be reached")


FOCUS_SEEN = """(() => {
  const at = document.activeElement, beside = at.nextElementSibling;
  const outlined = (node) => node && getComputedStyle(node).outlineStyle !== 'none';
  return at === document.body || outlined(at) || outlined(beside);
})()"""


def test_everything_that_can_be_pressed_has_a_name(page: Any) -> None:
    page.locator("#compare").click()
    settled(page, "B")
    nameless = page.evaluate(
        """[...document.querySelectorAll('button, input:not([type=file]), summary')].filter(
             (node) => !(node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length)
           ).map((node) => node.outerHTML)"""
    )
    assert nameless == []


def test_results_are_announced(page: Any) -> None:
    set_steps(page, 1)
    page.locator("#spoken[aria-live]", has_text="1 tape token read").wait_for(state="attached")


def test_a_bad_file_is_named_with_the_reason_and_the_page_goes_on(page: Any, picture: Any) -> None:
    name, title = page.locator(".guess .name").inner_text(), page.locator("[data-panel] h2").inner_text()
    upload(page, "notes.png", b"these are only words")
    message = page.locator("[data-panel] .message[role=alert]")
    message.wait_for()
    assert message.inner_text() == "notes.png: the upload is not an image"
    assert (page.locator(".guess .name").inner_text(), page.locator("[data-panel] h2").inner_text()) == (name, title)
    set_steps(page, 2)
    shows(page, "tokens", "6")
    upload(page, "nine.png", picture(9))
    page.locator("h2", has_text="nine.png").wait_for()
    assert not message.is_visible()


def test_a_server_that_is_gone_is_said_and_its_return_is_noticed(page: Any) -> None:
    page.route("**/v1/classify", lambda route: route.abort())
    set_steps(page, 1)
    page.locator("[data-panel] .message", has_text="did not answer").wait_for()
    page.unroute("**/v1/classify")
    set_steps(page, 2)
    shows(page, "tokens", "6")
    assert not page.locator("[data-panel] .message").is_visible()


def test_an_image_can_be_dropped(page: Any, picture: Any) -> None:
    data = page.evaluate_handle(
        """bytes => { const data = new DataTransfer();
             data.items.add(new File([new Uint8Array(bytes)], 'dropped.png', {type: 'image/png'})); return data; }""",
        list(picture(4)),
    )
    page.dispatch_event('[data-panel="A"] .drop', "drop", {"dataTransfer": data})
    page.locator("h2", has_text="dropped.png").wait_for()


def test_two_images_stand_side_by_side_at_one_budget(page: Any) -> None:
    page.locator("#compare").click()
    settled(page, "B")
    a, b = (page.locator(f'[data-panel="{letter}"]').bounding_box() for letter in "AB")
    assert a["y"] == b["y"]
    assert page.locator(".close:visible").bounding_box()["height"] < 40  # its word is not broken
    assert a["x"] + a["width"] <= b["x"]
    set_steps(page, 1)
    for letter in "AB":
        shows(page, "tokens", "5", letter)
    page.locator("#examples button").nth(5).click()
    page.locator('[data-panel="B"] h2', has_text="example 6").wait_for()
    assert "example 1" in page.locator('[data-panel="A"] h2').inner_text()
    page.locator(".close:visible").click()
    assert page.locator(".panels .panel").count() == 1
    assert overflow(page) == 0


def test_pictures_that_are_compared_are_level(page: Any) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    page.locator("#compare").click()
    settled(page, "B")
    titles = page.locator("[data-panel] h2 span:last-child")
    titles.nth(0).evaluate("node => node.textContent = 'example 1, labelled 0'")
    titles.nth(1).evaluate("node => node.textContent = 'example 2, labelled prohibitory, danger'")
    one, other = (page.locator(f"[data-panel={letter}] .scene").bounding_box() for letter in "AB")
    assert one["y"] == pytest.approx(other["y"], abs=1)


def test_no_slot_of_a_tape_stands_alone_in_its_row(page: Any) -> None:
    page.locator("#compare").click()
    settled(page, "B")
    for width in (1440, 1200, 900, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        tops = page.locator('[data-panel="B"] .tape > li').evaluate_all(
            "(slots) => slots.map((slot) => slot.offsetTop)"
        )
        rows = [tops.count(top) for top in sorted(set(tops))]
        assert rows in ([4], [2, 2], [1, 1, 1, 1])


def test_the_picture_is_above_the_fold(page: Any) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    box = page.locator(".scene").bounding_box()
    assert box["y"] + box["height"] <= 900
    assert box["width"] >= 400


def test_an_example_is_marked_while_a_panel_shows_it(page: Any, picture: Any) -> None:
    def marked() -> dict[int, str]:
        every = page.locator("#examples button").evaluate_all("(each) => each.map((one) => one.dataset.in)")
        return {n: letters for n, letters in enumerate(every) if letters}

    assert marked() == {0: "A"}
    page.locator("#compare").click()
    settled(page, "B")
    assert marked() == {0: "A", 1: "B"}
    page.locator("#examples button").first.click()
    page.locator('[data-panel="B"] h2', has_text="example 1").wait_for()
    assert marked() == {0: "A B"}
    assert page.locator('#examples button[aria-pressed="true"]').count() == 1
    page.locator(".close:visible").click()
    upload(page, "seven.png", picture(7))
    page.locator('[data-panel="A"] h2', has_text="seven.png").wait_for()
    assert marked() == {}


def test_what_the_model_saw_of_a_file_is_drawn_and_the_file_beside_it(page: Any, picture: Any) -> None:
    assert not page.locator(".file").is_visible()
    assert not page.locator(".doubt").is_visible()
    upload(page, "large.png", picture(7, 200))
    page.locator(
        ".file", has_text="The file has 200 × 200 pixels. The model saw the framed square of it as 8 × 8"
    ).wait_for()
    colours = page.locator(".scene canvas").evaluate(
        """(canvas) => new Set(Array.from({length: 64}, (_, i) =>
             canvas.getContext('2d').getImageData(i * canvas.width / 64, canvas.height / 2, 1, 1).data.join())).size"""
    )
    assert colours <= 8  # squares of one pixel each
    assert "unlike those that the model knows, most of all by its contrast" in page.locator(".far").inner_text()
    assert "360 images" in page.locator(".doubt").inner_text()
    upload(page, "small.png", picture(7))
    page.locator("h2", has_text="small.png").wait_for()
    assert not page.locator(".file").is_visible()
    assert not page.locator(".far").is_visible()
    assert "cannot be told" in page.locator(".doubt").inner_text()


def test_each_stop_says_what_it_gives_and_costs(page: Any) -> None:
    ticks = [text.split() for text in page.locator("#ticks span").all_inner_texts()]
    assert ticks == [
        ["0", "95.0", "%", "0.800"],
        ["1", "96.0", "%", "0.900"],
        ["2", "97.0", "%", "1.00"],
        ["3"],
        ["4", "99.0", "%", "1.20"],
    ]
    assert page.locator("#ticks-legend").inner_text() == "Under each stop: test accuracy, mean MFLOPs"
    assert page.locator("#unit").inner_text() == "MFLOPs: millions of multiply-adds."
    set_steps(page, 2)
    page.locator("#stop", has_text="At most 2: accuracy 97.0 % with 1 MFLOPs on average").wait_for()
    set_steps(page, 3)
    page.locator("#stop", has_text="up to 1.4 MFLOPs. Accuracy has not been measured here").wait_for()
    page.locator("#advanced summary").click()
    page.locator("#own").check()
    page.locator("#stop", has_text="hold where the threshold follows the budget").wait_for()


def test_the_heatmap_has_one_square_per_budget(page: Any) -> None:
    page.locator("#atlas").scroll_into_view_if_needed()
    page.locator("#maps li").nth(STEPS - 1).wait_for()
    assert page.locator("#maps rect").count() == STEPS * 16
    assert "60 images" in page.locator("#atlas-note").inner_text()
    note = page.locator("#atlas-note").inner_text()
    page.locator("input[value=weights]").check(force=True)
    assert page.locator("#atlas-note").inner_text() != note


@pytest.mark.parametrize("width", [320, 360, 768])
def test_no_width_scrolls_sideways(visit: Any, image_server: str, parity_server: str, width: int) -> None:
    page = visit(image_server, width)
    settled(page)
    page.locator("#compare").click()
    settled(page, "B")
    page.locator("#advanced summary").click()
    upload(page, "a-very-long-name-without-any-place-to-break-it-" * 3 + ".png", b"no image", "B")
    page.locator('[data-panel="B"] .message').wait_for()
    assert overflow(page) == 0
    parity = visit(parity_server, width)
    parity.locator("#verdict strong").wait_for()
    assert overflow(parity) == 0


def test_dark_is_dark_and_both_can_be_read(visit: Any, image_server: str) -> None:
    light, dark = (colours(visit(image_server, color_scheme=scheme)) for scheme in ("light", "dark"))
    assert brightness(light["ground"]) > 0.7 > 0.1 > brightness(dark["ground"])
    for scheme in (light, dark):
        assert contrast(scheme["ink"], scheme["ground"]) > 7
        assert contrast(scheme["soft"], scheme["ground"]) > 4.5


def colours(page: Any) -> dict[str, list[float]]:
    read = """() => {
      const [body, foot] = ['body', 'footer'].map((name) => getComputedStyle(document.querySelector(name)));
      return {ground: body.backgroundColor, ink: body.color, soft: foot.color};
    }"""
    return {name: [int(part) for part in re.findall(r"\d+", text)[:3]] for name, text in page.evaluate(read).items()}


def brightness(colour: list[float]) -> float:
    """Relative luminance as WCAG defines it."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[float], other: list[float]) -> float:
    low, high = sorted((brightness(one), brightness(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_sequence_is_edited_and_its_pairs_are_drawn(visit: Any, parity_server: str) -> None:
    page = visit(parity_server)
    page.locator("#verdict strong", has_text="even").wait_for()
    assert page.locator("#arcs .arc").count() == STEPS
    page.locator("#symbols button").nth(1).click()
    page.locator("#verdict strong", has_text="odd").wait_for()
    assert page.locator("#symbols button").nth(1).inner_text() == "1"
    page.locator("#remove").click()
    assert page.locator("#symbols button:enabled").count() == 11
    assert "the missing 1 are sent as −1" in page.locator("#padding").inner_text()
    page.locator("#add").click()
    assert page.locator("#symbols button:enabled").count() == 12
    set_steps(page, 2)
    page.locator("#arcs .arc").nth(2).wait_for(state="detached")
    assert page.locator("#arcs .arc").count() == 2
    page.locator(".tape button").nth(1).focus()
    assert page.locator('#arcs .arc.on[data-of="1"]').count() == 1


def test_the_page_asks_for_nothing_from_elsewhere(visit: Any, image_server: str) -> None:
    page = visit(image_server)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    settled(page)
    assert asked
    assert all(url.startswith((image_server, "data:", "blob:")) for url in asked)


def test_the_packaged_model_answers_the_page(visit: Any, serving: Any, picture: Any) -> None:
    application = pytest.importorskip("adatape.serve.app")
    loaded = pytest.importorskip("adatape.serve.served").load_served(DIGITS)
    with serving(application.create_app(loaded)) as address:
        page = visit(address)
        settled(page)
        assert "AdaTape for digits, 8 × 8 pixels" in page.locator("#facts").inner_text()
        assert page.locator("#ticks span").all_inner_texts()[0].split() == ["0", "98.3", "%", "0.799"]
        before = figure(page, "gflops")
        set_steps(page, 0)
        page.locator(".halt", has_text="Nothing is read").wait_for()
        assert float(figure(page, "gflops")) < float(before)
        assert not page.locator(".far").is_visible()
        upload(page, "grey.png", picture(1, 300))
        page.locator(".far", has_text="unlike those that the model knows").wait_for()
        upload(page, "empty.png", b"")
        page.locator("[data-panel] .message").wait_for()
        page.locator("#maps li").first.wait_for()


@pytest.mark.parametrize("steps", [0, 2])
def test_the_slider_starts_at_the_budget_that_is_stored_in_the_run(
    visit: Any, serving: Any, tmp_path: Path, steps: int
) -> None:
    application = pytest.importorskip("adatape.serve.app")
    folder = shutil.copytree(DIGITS, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    config["model"]["budget"] = {"steps": steps, "threshold": None}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = pytest.importorskip("adatape.serve.served").load_served(folder)
    with serving(application.create_app(loaded)) as address:
        page = visit(address)
        settled(page)
        assert page.locator("#steps").input_value() == str(steps)
        assert page.locator("#steps-value").inner_text() == f"{steps} of 4"
        if not steps:
            assert "Nothing is read" in halted(page)


def test_a_server_with_a_token_asks_its_visitor_for_it(visit: Any, serving: Any) -> None:
    application = pytest.importorskip("adatape.serve.app")
    loaded = pytest.importorskip("adatape.serve.served").load_served(DIGITS)
    with serving(application.create_app(loaded, token="s3cret")) as address:
        page = visit(address)
        for given in ("wrong", "s3cret"):
            page.locator("#token input").fill(given)
            page.locator("#token button").click()
        settled(page)
        assert page.locator(".bars li").count() == 5


def test_a_scene_shows_its_windows_in_order_with_their_crops_and_what_each_budget_gives(
    visit: Any, serving: Any, picture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    application = pytest.importorskip("adatape.serve.app")
    monkeypatch.setattr("adatape.serve.engine.REPEATS", 1)
    monkeypatch.setattr("adatape.serve.engine.measured_budgets", lambda model: [model.budget()])
    loaded = pytest.importorskip("adatape.serve.served").load_served(None)
    with serving(application.create_app(loaded)) as address:
        page = visit(address, width=390)
        settled(page)
        read = int(figure(page, "tokens"))
        assert 1 < read < 8
        assert page.locator("svg .frame").count() == page.locator(".tape .crop").count() == read
        assert f"Stopped after {read} windows of at most 8: the next window's score was below 63 %" in halted(page)
        assert "63 %" in page.locator("#stop").inner_text()  # in the unit of the scores under the windows
        assert page.locator("#examples button").count() == 12
        assert page.locator("#ticks span").count() == 8
        assert page.locator("#unit").inner_text() == "GFLOPs: billions of multiply-adds."
        assert "sign" not in page.locator("#lead").inner_text()  # as much is said of any model of windows
        assert "100 %" not in page.locator(".bars b").all_inner_texts()
        assert page.locator("#steps").get_attribute("min") == "1"
        assert overflow(page) == 0
        box = page.locator(".frame").last.bounding_box()
        scene = page.locator(".scene").bounding_box()
        assert box["width"] == pytest.approx(64 * scene["width"] / 1360, abs=6)
        set_steps(page, 1)
        shows(page, "tokens", "1")
        page.locator("#stop", has_text=re.compile(r"^At most 1, fewer .*: mean AP 0\.\d+ with")).wait_for(
            state="attached"
        )
        assert "all that the budget allows" in halted(page)
        assert page.locator(".far").is_hidden()
        upload(page, "tall.png", picture(3, 400))
        page.locator(".fitted", has_text="400 × 400 pixels at 800 × 800, with grey borders up to 1360 × 800").wait_for()
        page.locator(".far", has_text="unlike those that the model knows").wait_for()
        several_labels_are_named_and_marked(page)


@pytest.mark.usefixtures("few_canvases")
def test_a_square_canvas_shows_its_windows_too(visit: Any, serving: Any, picture: Any, tmp_path: Path) -> None:
    application = pytest.importorskip("adatape.serve.app")
    run(haystack(steps=2), tmp_path / "run", "cpu", lambda _: None)
    loaded = pytest.importorskip("adatape.serve.served").load_served(tmp_path / "run")
    with serving(application.create_app(loaded)) as address:
        page = visit(address, width=1440)
        settled(page)
        read = int(figure(page, "tokens"))
        assert read
        assert not page.locator("[data-panel] .message").is_visible()
        assert page.locator("svg .frame").count() == page.locator(".tape .crop").count() == read
        example = page.locator("#examples button").first.bounding_box()
        assert example["width"] == pytest.approx(example["height"], abs=1)
        scene, result = (page.locator(part).first.bounding_box() for part in (".scene", ".result"))
        assert 0 < result["x"] - scene["x"] - scene["width"] < 40  # the answer stands beside the canvas
        upload(page, "large.png", picture(3, 400))
        page.locator(
            ".fitted", has_text="the middle square of this image of 400 × 400 pixels, 351 of them wide"
        ).wait_for()


@pytest.mark.parametrize("family", ["plainvit", "ut", "parity transformer"])
def test_a_model_without_a_tape_is_not_said_to_read_one(family: str, visit: Any, serving: Any, tmp_path: Path) -> None:
    application = pytest.importorskip("adatape.serve.app")
    run(tiny(family), tmp_path / "run", "cpu", lambda _: None)
    loaded = pytest.importorskip("adatape.serve.served").load_served(tmp_path / "run")
    with serving(application.create_app(loaded)) as address:
        page = visit(address)
        page.locator(":is(.guess .name, #verdict strong):not(:empty)").wait_for()
        text = page.locator("body").inner_text()
        assert "This model reads no tape" in text
        assert not any(word in text for word in ("The tape", "Nothing is read", "as arcs", "0 read"))


def test_a_learned_bank_has_no_map_of_patches(visit: Any, serving: Any, tmp_path: Path) -> None:
    application = pytest.importorskip("adatape.serve.app")
    run(tiny("adatape-learn"), tmp_path / "run", "cpu", lambda _: None)
    loaded = pytest.importorskip("adatape.serve.served").load_served(tmp_path / "run")
    with serving(application.create_app(loaded)) as address:
        page = visit(address)
        settled(page)
        assert not page.locator("#atlas").is_visible()
        assert page.locator("#ticks-legend").inner_text() == "Under each stop: MFLOPs at most"


def several_labels_are_named_and_marked(page: Any) -> None:
    """Every label has a bar; those above one half are the answer, in the order of the bars."""
    page.locator("#examples button").first.click()
    page.locator("h2", has_text="example 1, labelled mandatory, other").wait_for()
    bars = page.locator(".bars li")
    assert bars.count() == 4
    present = page.locator(".bars li.present span").all_inner_texts()
    assert page.locator(".guess .name").inner_text() == (", ".join(present) or "no label")
    assert page.locator(".guess .sure").inner_text() == f"{len(present)} of 4 labels"
    chances = [shown(text) for text in page.locator(".bars b").all_inner_texts()]
    assert chances == sorted(chances, reverse=True)
    assert sum(chance > 50 for chance in chances) == len(present)


def shown(percentage: str) -> float:
    return float(re.sub(r"[^0-9.]", "", percentage))


def halted(page: Any) -> str:
    return page.locator(".halt").inner_text()
