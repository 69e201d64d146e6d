import { draw, shaded } from "./dom.js";
import { clamp, plural, signed } from "./numbers.js";
import { heat } from "./tape.js";

/** Whether the buttons fit under the arcs one to one, so that the arcs can end on the buttons themselves. */
export const roomy = (pitch) => pitch >= 38;

/** One arc per group of symbols read, the wider the higher. */
export function drawArcs(width, symbols, pairs) {
  const pitch = width / symbols.length;
  const dot = roomy(pitch) ? 0 : clamp(pitch * 0.36, 2.5, 13);
  const spans = pairs.map(({ index }) => Math.max(...index) - Math.min(...index));
  const top = Math.max(...spans, 1);
  const tall = clamp(top * pitch * 0.5, 40, 170);
  const floor = tall + 22;
  const height = floor + 2 * dot + 8;
  const x = (at) => (at + 0.5) * pitch;
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", `${plural(pairs.length, "group")} of symbols read, in order`);
  const share = heat(pairs);
  pairs.forEach((pair, t) =>
    svg.append(shaded(arc(pair, t, x, floor, 14 + (tall - 14) * (spans[t] / top)), share(Math.max(...pair.weight)))));
  if (dot) symbols.forEach((symbol, at) => svg.append(...dotted(symbol, x(at), floor + dot + 4, dot)));
  return svg;
}

function arc({ index, weight }, t, x, floor, lift) {
  const group = draw("g", { class: "arc", "data-of": t });
  const [low, high] = [Math.min(...index), Math.max(...index)];
  const middle = (x(low) + x(high)) / 2;
  for (const at of index.filter((at) => at !== low))
    group.append(draw("path", { d: `M${x(low)} ${floor} C${x(low)} ${floor - lift * 1.33} ${x(at)} ${floor - lift * 1.33} ${x(at)} ${floor}` }));
  index.forEach((at, k) => group.append(draw("circle", { cx: x(at), cy: floor, r: 1.5 + 3 * weight[k] })));
  group.append(draw("circle", { class: "chip", cx: middle, cy: floor - lift, r: 8 }));
  group.append(draw("text", { x: middle, y: floor - lift + 3.5 }, `${t + 1}`));
  return group;
}

function dotted(symbol, x, y, r) {
  const text = r > 8 ? [draw("text", { x, y: y + 4, class: `digit s${symbol + 1}` }, signed(symbol))] : [];
  return [draw("circle", { class: `dot s${symbol + 1}`, cx: x, cy: y, r }), ...text];
}
