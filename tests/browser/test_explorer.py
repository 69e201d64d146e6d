"""The Explorer in a real browser: what a visitor does, and what the page then shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGED = Path(__file__).parents[2] / "src" / "adatape" / "serve" / "model"
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


def test_the_packaged_model_answers_the_page(visit: Any, serving: Any) -> None:
    if not PACKAGED.is_dir():
        pytest.skip("the package holds no model yet")
    application = pytest.importorskip("adatape.serve.app")
    loaded = pytest.importorskip("adatape.serve.served").load_served(None)
    with serving(application.create_app(loaded)) as address:
        page = visit(address)
        settled(page)
        before = figure(page, "gflops")
        set_steps(page, 0)
        page.locator(".halt", has_text="Nothing is read").wait_for()
        assert float(figure(page, "gflops")) < float(before)
        upload(page, "empty.png", b"")
        page.locator("[data-panel] .message").wait_for()
        page.locator("#maps li").first.wait_for()


def test_a_server_with_a_token_asks_its_visitor_for_it(visit: Any, serving: Any) -> None:
    application = pytest.importorskip("adatape.serve.app")
    loaded = pytest.importorskip("adatape.serve.served").load_served(None)
    with serving(application.create_app(loaded, token="s3cret")) as address:
        page = visit(address)
        for given in ("wrong", "s3cret"):
            page.locator("#token input").fill(given)
            page.locator("#token button").click()
        settled(page)
        assert page.locator(".bars li").count() == 5
