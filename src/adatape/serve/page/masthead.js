import { $, draw, make } from "./dom.js";
import { many } from "./numbers.js";
import { sides } from "./picture.js";

/** The page's name in the seven-bit code of punched tape. */
export function punch(text) {
  const svg = draw("svg", { viewBox: `0 0 ${text.length * 4} 34`, preserveAspectRatio: "xMinYMid slice" });
  [...text].forEach((letter, column) => {
    const holes = [...letter.charCodeAt(0).toString(2).padStart(8, "0")];
    holes.forEach((bit, row) => bit === "1" && svg.append(draw("circle", { cx: column * 4 + 2, cy: row * 4 + 2 + (row > 4 ? 2 : 0), r: 1.4 })));
    svg.append(draw("circle", { cx: column * 4 + 2, cy: 21, r: 0.7 }));
  });
  $("#punched").replaceChildren(svg);
}

export function showFacts(model) {
  const facts = [model.name, `${many(model.parameters)} parameters`];
  if (model.mean_ap != null) facts.push(`mean AP ${model.mean_ap.toFixed(3)} on its test set`);
  else if (model.accuracy != null) facts.push(`${(100 * model.accuracy).toFixed(1)} % right on its test set`);
  if (model.kind === "image") facts.push(`${model.classes.length} ${model.several_labels ? "labels" : "classes"}`);
  if (model.bank?.kind === "windows") showWindows(sides(model.input.size));
  if (!model.bank?.kind) showNoTape(model.kind === "parity" ? "sequence" : "picture");
  $("#facts").replaceChildren(...facts.map((fact) => make("span", { textContent: fact })));
}

/** Of a plain Transformer, or one that adapts its depth: the style sheet hides what is about tapes. */
function showNoTape(input) {
  document.body.dataset.bank = "none";
  $("#lead").textContent = `This model reads no tape: it sees the whole ${input} at once.`;
}

function showWindows([height, width]) {
  document.body.dataset.bank = "windows";
  document.body.style.setProperty("--aspect", width / height);
  $("#lead").textContent = "A thin scan of the whole picture finds a few windows, and only these are read at full resolution. " +
    "Where nothing scores high, hardly any are.";
}
