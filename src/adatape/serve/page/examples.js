import { ask } from "./api.js";
import { $, all, make } from "./dom.js";
import { panels, target } from "./panels.js";
import { blobOf } from "./picture.js";

export async function setUpExamples() {
  const { examples } = await ask("/v1/examples?count=12").catch(() => ({ examples: [] }));
  const picks = examples.map(({ name, image }, i) => ({ blob: blobOf(image), title: `example ${i + 1}, ${name === "no label" ? "with" : "labelled"} ${name}`, image }));
  $("#examples").replaceChildren(...picks.map((pick) => {
    const button = make("button", { type: "button" }, make("img", { src: pick.image, alt: "" }));
    button.setAttribute("aria-label", `Use ${pick.title}`);
    button.addEventListener("click", () => target().offer(pick.blob, pick.title));
    return make("li", {}, button);
  }));
  $("#shelf").hidden = !picks.length;
  $("#panels").addEventListener("picked", () => mark(picks));
  return picks;
}

/** Shows which examples stand in the panels, and in which. */
function mark(picks) {
  all("#examples button").forEach((button, i) => {
    const letters = [...panels].filter(([, panel]) => panel.picked?.blob === picks[i].blob).map(([letter]) => letter);
    button.dataset.in = letters.join(" ");
    button.setAttribute("aria-pressed", String(letters.length > 0));
  });
}
