import { $ } from "./dom.js";
import { figure } from "./numbers.js";
import { work } from "./work.js";

export function showFigures(root, { tokens, tape_length: length = 0, gflops, ms }, bank, steps) {
  const windows = bank === "windows";
  const made = windows ? `of at most ${steps}` : bank ? `${tokens - length} always + ${length} read` : "";
  const figures = { tokens: figure(windows ? length : tokens), made, gflops: work(gflops), ms: figure(ms) };
  for (const [name, value] of Object.entries(figures)) changed($(`[data-figure=${name}]`, root), value);
  return length;
}

function changed(node, text) {
  if (node.textContent === text) return;
  const first = node.textContent === "";
  node.textContent = text;
  if (!first) node.animate?.([{ opacity: 0.25 }, { opacity: 1 }], 350);
}
