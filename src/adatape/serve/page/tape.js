import { announce } from "./announce.js";
import { budget } from "./budget.js";
import { $, all, make, shaded } from "./dom.js";
import { clamp, figure, percent, sum } from "./numbers.js";

const THUMBS = 6;
const REM = 16; // pixels
const LEAST = { token: 9.5, window: 5 }; // rem of a slot

export function haltSentence(tape, used) {
  const steps = used.steps ?? budget.steps;
  if (!tape.length) return "Nothing is read: at this budget it is a plain Transformer.";
  const total = figure(sum(tape.map((token) => Math.max(...token.weight))));
  const limit = used.threshold == null ? null : figure(used.threshold);
  const read = `${tape.length} of ${steps}`;
  if (tape.length < steps)
    return `Stopped after ${read}: the largest weights of these tokens sum to ${total}` +
      (limit ? `, and the threshold is ${limit}.` : ".");
  return `Read ${read}, all that the budget allows: the largest weights sum to ${total}` +
    (limit ? ` (threshold ${limit}).` : ".");
}

/** Columns, of those that fit, that leave the fewest places of the last row empty; the more columns the better. */
export function columnsOf(slots, fitting) {
  const most = clamp(fitting, 1, Math.max(slots, 1));
  const possible = Array.from({ length: Math.floor(most / 2) + 1 }, (_, i) => most - i).filter((columns) => columns > 1 || most === 1);
  const empty = (columns) => Math.ceil(slots / columns) * columns - slots;
  return possible.reduce((best, columns) => (empty(columns) < empty(best) ? columns : best));
}

/** Where a weight stands between the lightest and the heaviest of one tape. */
export function heat(tape) {
  const weights = tape.flatMap((token) => token.weight);
  const [low, high] = [Math.min(...weights), Math.max(...weights)];
  return (weight) => (high > low ? (weight - low) / (high - low) : 1);
}

/** Brings out what belongs to one token; without a token nothing stands back. */
export function emphasise(marks, token) {
  for (const mark of marks) {
    mark.classList.toggle("on", Number(mark.dataset.of) === token);
    mark.classList.toggle("off", token !== null && Number(mark.dataset.of) !== token);
  }
}

/** The tape as a strip of tokens that can be pointed at, stepped through and played. */
export class Reading {
  constructor(root, highlight) {
    root.append($("#reading").content.cloneNode(true));
    this.root = root;
    this.highlight = highlight;
    this.pinned = null;
    this.tape = [];
    root.addEventListener("click", (event) => this.#clicked(event));
    new ResizeObserver(() => this.#columns()).observe(root);
    for (const name of ["pointerover", "focusin"])
      root.addEventListener(name, (event) => this.#point(event.target.closest("[data-token]")));
    $(".tape", root).addEventListener("pointerleave", () => this.select(this.pinned));
    $(".tape", root).addEventListener("focusout", () => this.select(this.pinned));
  }

  show(tape, used, part, sentence = haltSentence(tape, used)) {
    this.stop();
    const before = this.pinned;
    this.tape = tape;
    const steps = used.steps ?? budget.steps;
    const focused = document.activeElement?.closest?.(".tape") === $(".tape", this.root)
      ? document.activeElement.dataset.token : null;
    const blanks = Array.from({ length: Math.max(0, steps - tape.length) }, (_, i) => this.#blank(tape.length + i));
    $(".tape", this.root).replaceChildren(...tape.map((token, t) => this.#cell(token, t, part)), ...blanks);
    this.#columns();
    $(".halt", this.root).textContent = sentence;
    this.#meter(this.describe ? null : used.threshold);
    $(".steppers", this.root).hidden = tape.length === 0;
    $(".scale", this.root).hidden = tape.length === 0 || Boolean(this.describe);
    const weights = tape.flatMap((token) => token.weight);
    if (weights.length) $(".scale", this.root).dataset.range = `${percent(Math.min(...weights))} to ${percent(Math.max(...weights))}`;
    this.pinned = before !== null && before < tape.length ? before : null;
    this.select(this.pinned);
    if (focused !== null) $(`[data-token="${Math.min(focused, tape.length - 1)}"]`, this.root)?.focus();
  }

  select(token) {
    this.current = token;
    for (const cell of all("[data-token]", this.root)) {
      const here = Number(cell.dataset.token) === token;
      cell.classList.toggle("on", here);
      cell.setAttribute("aria-pressed", String(Number(cell.dataset.token) === this.pinned));
    }
    all(".meter > i", this.root).forEach((part, t) => part.classList.toggle("on", t === token));
    this.highlight(token);
  }

  pin(token) {
    this.pinned = token;
    this.select(token);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    $("[data-go=play]", this.root).textContent = "Play";
  }

  #columns() {
    const least = REM * LEAST[this.describe ? "window" : "token"];
    const tape = $(".tape", this.root);
    tape.style.setProperty("--columns", columnsOf(tape.childElementCount, Math.floor(this.root.clientWidth / least)));
  }

  #point(cell) {
    if (cell && !this.timer) this.select(Number(cell.dataset.token));
  }

  #clicked(event) {
    const cell = event.target.closest("[data-token]");
    const go = event.target.closest("[data-go]")?.dataset.go;
    const playing = this.timer;
    if (cell || go) this.stop();
    if (cell) this.pin(this.pinned === Number(cell.dataset.token) ? null : Number(cell.dataset.token));
    else if (go === "play" && !playing) this.#play();
    else if (go && go !== "play") this.#step(Number(go));
  }

  #step(by) {
    const start = this.pinned ?? (by > 0 ? -1 : this.tape.length);
    this.pin(clamp(start + by, 0, this.tape.length - 1));
    announce(this.#describe(this.pinned));
  }

  #play() {
    $("[data-go=play]", this.root).textContent = "Pause";
    let next = this.pinned === null || this.pinned === this.tape.length - 1 ? 0 : this.pinned + 1;
    const tick = () => {
      if (next < this.tape.length) return this.pin(next++);
      this.stop();
      this.pin(null);
    };
    this.timer = setInterval(tick, 900);
    tick();
  }

  #describe(t) {
    if (this.describe) return this.describe(t, this.tape[t]);
    const { index, weight } = this.tape[t];
    return `Token ${t + 1} merges ${index.map((at, k) => `${this.noun?.(at) ?? at} (${percent(weight[k])})`).join(", ")}`;
  }

  #cell(token, t, part) {
    const parts = token.index.slice(0, THUMBS).map((at, k) =>
      shaded(make("span", { className: "part" }, part(at, token, k), make("b", { textContent: percent(token.weight[k]) })),
        heat(this.tape)(token.weight[k])));
    const rest = token.index.length - parts.length;
    const cell = make("button", { type: "button" }, make("span", { className: "order", textContent: t + 1 }),
      make("span", { className: "parts" }, ...parts, ...(rest > 0 ? [`+${rest}`] : [])));
    cell.dataset.token = t;
    cell.setAttribute("aria-label", this.#describe(t));
    return make("li", {}, cell);
  }

  #blank(t) {
    return make("li", { className: "blank" }, make("span", { className: "order", textContent: t + 1 }), "not read");
  }

  /** Largest weights end to end, against the threshold that stops the reading. */
  #meter(threshold) {
    const meter = $(".meter", this.root);
    const largest = this.tape.map((token) => Math.max(...token.weight));
    const full = Math.max(sum(largest), threshold ?? 0, 1e-9);
    meter.hidden = !this.tape.length || threshold == null;
    const mark = make("u");
    mark.style.insetInlineStart = `${(100 * Math.min(threshold ?? 0, full)) / full}%`;
    meter.replaceChildren(...largest.map((weight) => {
      const part = make("i");
      part.style.inlineSize = `${(100 * weight) / full}%`;
      return part;
    }), mark);
  }
}
