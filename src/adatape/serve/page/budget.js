import { $, all, make, shaded } from "./dom.js";
import { figure } from "./numbers.js";

const DEBOUNCE = 120;
export const budget = { steps: 0, trained: 0, threshold: null, listeners: [], timer: 0 };

budget.query = () => {
  const named = { steps: budget.trained ? budget.steps : null, threshold: budget.threshold };
  return Object.entries(named).filter(([, value]) => value !== null);
};

budget.changed = () => {
  clearTimeout(budget.timer);
  budget.timer = setTimeout(() => budget.listeners.forEach((listener) => listener()), DEBOUNCE);
};

export function setUpBudget({ budget: trained, default: preset }, tape) {
  const [steps, own, threshold] = [$("#steps"), $("#own"), $("#threshold")];
  budget.trained = trained.steps ?? 0;
  budget.steps = preset?.steps ?? budget.trained;
  steps.min = tape ? 0 : 1; // what repeats its blocks takes at least one step
  steps.max = budget.trained;
  steps.value = budget.steps;
  if (!tape) $("label[for=steps]").textContent = "Steps that may be taken";
  const ticks = Math.max(1, Math.ceil(budget.trained / 10));
  for (let tick = Number(steps.min); tick <= budget.trained; tick += ticks) $("#ticks").append(make("span", { textContent: tick }));
  Object.assign(threshold, { min: 0.05, max: Math.max(budget.trained, trained.threshold ?? 0), step: 0.05 });
  threshold.value = preset?.threshold || trained.threshold || threshold.max;
  const usual = (trained.threshold * budget.steps) / budget.trained;
  own.checked = Boolean(preset?.threshold) && Math.abs(preset.threshold - usual) > 1e-6; // a stored budget of its own
  steps.addEventListener("input", () => {
    budget.steps = Number(steps.value);
    showBudget();
    budget.changed();
  });
  const choose = () => {
    threshold.disabled = !own.checked;
    budget.threshold = own.checked ? Number(threshold.value) : null;
    showBudget();
  };
  for (const [input, name] of [[own, "change"], [threshold, "input"]])
    input.addEventListener(name, () => {
      choose();
      budget.changed();
    });
  choose();
  $("#budget").hidden = budget.trained === 0;
  $("#advanced").hidden = trained.threshold == null;
}

export function showBudget() {
  const steps = $("#steps");
  $("#steps-value").textContent = `${budget.steps} of ${budget.trained}`;
  steps.setAttribute("aria-valuetext", `${budget.steps} of ${budget.trained}`);
  for (const input of all("input[type=range]"))
    shaded(input, (input.value - input.min) / Math.max(input.max - input.min, 1e-9));
  $("#threshold-value").textContent = budget.threshold === null ? "follows the budget" : figure(budget.threshold);
  for (const map of all("#maps > li")) map.classList.toggle("now", Number(map.dataset.steps) === budget.steps);
}

/** What the server used where the visitor left the threshold to it. */
export function followThreshold(threshold) {
  if (budget.threshold !== null || !threshold) return;
  $("#threshold").value = threshold;
  showBudget();
  $("#threshold-value").textContent = `${figure(threshold)}, follows the budget`;
}
