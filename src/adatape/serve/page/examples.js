import { ask } from "./api.js";
import { $, make } from "./dom.js";
import { target } from "./panels.js";

export async function setUpExamples() {
  const { examples } = await ask("/v1/examples?count=12").catch(() => ({ examples: [] }));
  const picks = examples.map(({ name, image }, i) => ({ blob: blobOf(image), title: `example ${i + 1}, labelled ${name}`, image }));
  $("#examples").replaceChildren(...picks.map((pick) => {
    const button = make("button", { type: "button" }, make("img", { src: pick.image, alt: "" }));
    button.setAttribute("aria-label", `Use ${pick.title}`);
    button.addEventListener("click", () => target().offer(pick.blob, pick.title));
    return make("li", {}, button);
  }));
  $("#shelf").hidden = !picks.length;
  return picks;
}

function blobOf(url) {
  const [head, body] = url.split(",");
  const bytes = Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0));
  return new Blob([bytes], { type: head.match(/^data:([^;]*)/)[1] });
}
