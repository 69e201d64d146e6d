import { $, all } from "./dom.js";
import { digits, figure } from "./numbers.js";

const SMALL = 0.1; // GFLOPs of a full budget below which millions say more
const unit = { name: "GFLOPs", gflops: 1 };

/** One unit for all figures of a page, so that they can be compared. */
export function setUnit({ gflops }) {
  const small = gflops != null && gflops < SMALL;
  Object.assign(unit, small ? { name: "MFLOPs", gflops: 1e-3 } : { name: "GFLOPs", gflops: 1 });
  nameUnit(document);
  $("#unit").textContent = `${unit.name}: ${small ? "millions" : "billions"} of multiply-adds.`;
}

export const nameUnit = (root) => all("[data-unit]", root).forEach((node) => (node.textContent = unit.name));
export const unitName = () => unit.name;
/** With its zeros, for figures that stand in a row. */
export const workDigits = (gflops) => digits(gflops == null ? null : gflops / unit.gflops);
export const work = (gflops) => figure(gflops == null ? null : gflops / unit.gflops);
