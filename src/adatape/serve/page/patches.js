import { draw, shaded } from "./dom.js";
import { percent } from "./numbers.js";
import { heat } from "./tape.js";

/** Everything the tape did not read is dimmed; what it read is framed, numbered, coloured by weight. */
export function outline(svg, tape, [rows, columns]) {
  svg.setAttribute("viewBox", `0 0 ${columns} ${rows}`);
  const holes = tape.flatMap((token) => token.index).map((at) => `M${at % columns} ${Math.floor(at / columns)}h1v1h-1z`);
  svg.append(draw("path", { class: "scrim", "fill-rule": "evenodd", d: `M0 0h${columns}v${rows}h-${columns}z${holes.join("")}` }));
  const share = heat(tape);
  tape.forEach((token, t) => token.index.forEach((at, k) =>
    svg.append(shaded(patch(t, at, token.weight[k], columns), share(token.weight[k])))));
}

function patch(t, at, weight, columns) {
  const group = draw("g", { class: "patch", "data-of": t, transform: `translate(${at % columns} ${Math.floor(at / columns)})` });
  const text = columns > 12 ? 0.62 : columns > 5 ? 0.36 : 0.24;
  group.append(
    draw("title", {}, `Token ${t + 1}, weight ${percent(weight)}`),
    draw("rect", { class: "frame", width: 1, height: 1 }),
    draw("rect", { class: "chip", width: text * (t > 8 ? 1.5 : 1.1), height: text * 1.1 }),
    draw("text", { x: text * (t > 8 ? 0.75 : 0.55), y: text * 0.9, "font-size": text * 0.95 }, `${t + 1}`),
  );
  return group;
}
