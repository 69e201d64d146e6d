import { $ } from "./dom.js";
import { figure } from "./numbers.js";

export function showFigures(root, { tokens, tape_length: length = 0, gflops, ms }, bank) {
  const made = bank ? `${tokens - length} always + ${length} read` : "";
  const figures = { tokens: figure(tokens), made, gflops: figure(gflops), ms: figure(ms) };
  for (const [name, value] of Object.entries(figures)) changed($(`[data-figure=${name}]`, root), value);
  return length;
}

function changed(node, text) {
  if (node.textContent === text) return;
  const first = node.textContent === "";
  node.textContent = text;
  if (!first) node.animate?.([{ opacity: 0.25 }, { opacity: 1 }], 350);
}
