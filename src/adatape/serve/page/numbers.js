export const sum = (values) => values.reduce((a, b) => a + b, 0);
export const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
export const signed = (symbol) => `${symbol}`.replace("-", "−");

export const percent = (share) => {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  if (share < 1 && share > 0.999) return "> 99.9 %";
  return `${(100 * share).toFixed((share > 0.99 || share < 0.1) && share % 1 ? 1 : 0)} %`;
};

export function figure(value) {
  if (value == null) return "–";
  if (value === 0) return "0";
  return value >= 100 ? value.toFixed(0) : Number(value.toPrecision(3)).toString();
}

/** Three digits of every figure, zeros included. */
export const digits = (value) => (value == null ? "–" : value >= 100 ? value.toFixed(0) : value.toPrecision(3));

/** Of a probability: floating point may round it to 1, but no model is that sure. */
export const chance = (share) => percent(Math.min(share, 1 - 1e-6));

export function many(value) {
  for (const [unit, size] of [["billion", 1e9], ["million", 1e6], ["thousand", 1e3]])
    if (value >= size) return `${figure(value / size)} ${unit}`;
  return `${value}`;
}
