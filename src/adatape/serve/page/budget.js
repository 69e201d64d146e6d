import { $, all, make, say, shaded } from "./dom.js";
import { figure, percent } from "./numbers.js";
import { unitName, work, workDigits } from "./work.js";

const DEBOUNCE = 120;
export const budget = { steps: 0, trained: 0, threshold: null, stops: [], listeners: [], timer: 0 };

budget.query = () => {
  const named = { steps: budget.trained ? budget.steps : null, threshold: budget.threshold };
  return Object.entries(named).filter(([, value]) => value !== null);
};

budget.changed = () => {
  clearTimeout(budget.timer);
  budget.timer = setTimeout(() => budget.listeners.forEach((listener) => listener()), DEBOUNCE);
};

export function setUpBudget({ budget: trained, default: preset, stops = [], bank }, tape) {
  const [steps, own, threshold] = [$("#steps"), $("#own"), $("#threshold")];
  budget.trained = trained.steps ?? 0;
  budget.steps = preset?.steps ?? budget.trained;
  budget.stops = stops;
  budget.windows = bank?.kind === "windows";
  steps.min = trained.least ?? (tape ? 0 : 1); // what repeats its blocks takes at least one step
  steps.max = budget.trained;
  steps.value = budget.steps;
  if (!tape) $("label[for=steps]").textContent = "Steps that may be taken";
  if (budget.windows) $("label[for=steps]").textContent = "Windows that may be read";
  const ticks = Math.max(1, Math.ceil(budget.trained / 10));
  for (let tick = Number(steps.min); tick <= budget.trained; tick += ticks) $("#ticks").append(tickOf(tick));
  $("#ticks").classList.toggle("many", $("#ticks").childElementCount > 8);
  say($("#ticks-legend"), legend());
  Object.assign(threshold, { min: 0.05, max: Math.max(budget.trained, trained.threshold ?? 0), step: 0.05 });
  threshold.value = preset?.threshold || trained.threshold || threshold.max;
  const usual = (trained.threshold * budget.steps) / budget.trained;
  own.checked = trained.threshold != null && Boolean(preset?.threshold) && Math.abs(preset.threshold - usual) > 1e-6; // a stored budget of its own
  steps.addEventListener("input", () => {
    budget.steps = Number(steps.value);
    showBudget();
    budget.changed();
  });
  const choose = (value) => {
    threshold.disabled = !own.checked;
    budget.threshold = own.checked ? value : null;
    showBudget();
  };
  for (const [input, name] of [[own, "change"], [threshold, "input"]])
    input.addEventListener(name, () => {
      choose(Number(threshold.value));
      budget.changed();
    });
  choose(preset?.threshold); // as stored, which may lie between two places of the slider
  $("#budget").hidden = budget.trained === 0;
  $("#advanced").hidden = trained.threshold == null;
}

const stopAt = (steps) => budget.stops.find((stop) => stop.steps === steps);
const measured = (stop) => stop?.accuracy != null || stop?.mean_ap != null;
const quality = (stop) => (stop.mean_ap == null ? `${(100 * stop.accuracy).toFixed(1)} %` : stop.mean_ap.toFixed(2));
const qualityName = (stop) => (stop.mean_ap == null ? "accuracy" : "mean AP");

/** A number of steps, and what it gives on the test set and costs, as far as that is known. */
function tickOf(steps) {
  const stop = stopAt(steps);
  const bound = stop && !budget.stops.some(measured) ? [workDigits(stop.gflops)] : []; // beside means a bound would mislead
  const figures = measured(stop) ? [quality(stop), workDigits(stop.gflops_mean)] : bound;
  return make("span", {}, make("b", { textContent: steps }), ...figures.map((text) => make("i", { textContent: text })));
}

function legend() {
  const known = budget.stops.find(measured);
  if (known) return `Under each stop: test ${qualityName(known)}, mean ${unitName()}`;
  return budget.stops.length ? `Under each stop: ${unitName()} at most` : "";
}

function stopSentence(stop) {
  if (budget.threshold !== null) return "Figures under the stops hold where the threshold follows the budget.";
  if (!measured(stop))
    return `At most ${stop.steps}: up to ${work(stop.gflops)} ${unitName()}. Accuracy has not been measured here; this does: ` +
      `adatape eval RUN --budgets ${budget.stops.map((each) => each.steps).join(",")}`;
  const read = budget.windows ? `${figure(stop.length_mean)} windows and ` : "";
  const floor = budget.windows && stop.threshold ? `, fewer where the next score is below ${percent(stop.threshold)}` : "";
  return `At most ${stop.steps}${floor}: ${qualityName(stop)} ${stop.mean_ap?.toFixed(3) ?? quality(stop)} with ${read}` +
    `${work(stop.gflops_mean)} ${unitName()} on average over the test set.`;
}

export function showBudget() {
  const steps = $("#steps");
  $("#steps-value").textContent = `${budget.steps} of ${budget.trained}`;
  steps.setAttribute("aria-valuetext", `${budget.steps} of ${budget.trained}`);
  for (const input of all("input[type=range]"))
    shaded(input, (input.value - input.min) / Math.max(input.max - input.min, 1e-9));
  $("#threshold-value").textContent = budget.threshold === null ? "follows the budget" : figure(budget.threshold);
  const stop = stopAt(budget.steps);
  say($("#stop"), stop ? stopSentence(stop) : "");
  for (const map of all("#maps > li")) map.classList.toggle("now", Number(map.dataset.steps) === budget.steps);
}

/** What the server used where the visitor left the threshold to it. */
export function followThreshold(threshold) {
  if (budget.threshold !== null || !threshold) return;
  $("#threshold").value = threshold;
  showBudget();
  $("#threshold-value").textContent = `${figure(threshold)}, follows the budget`;
}
