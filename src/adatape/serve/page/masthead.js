import { $, draw, make } from "./dom.js";
import { many, percent } from "./numbers.js";

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
  if (model.accuracy != null) facts.push(`${percent(model.accuracy)} right on its test set`);
  if (model.kind === "image") facts.push(`${model.classes.length} classes`, `${model.input.size} × ${model.input.size} pixels`);
  else facts.push(`${model.length} symbols`);
  $("#facts").replaceChildren(...facts.map((fact) => make("span", { textContent: fact })));
}
