import { announce } from "./announce.js";
import { ask, Latest } from "./api.js";
import { drawArcs, roomy } from "./arcs.js";
import { budget } from "./budget.js";
import { $, all, make, say } from "./dom.js";
import { showFigures } from "./figures.js";
import { percent, plural, signed } from "./numbers.js";
import { emphasise, Reading } from "./tape.js";

const SYMBOLS = [-1, 0, 1];

export function setUpParity(model) {
  if (model.bank?.kind)
    $("#lead").textContent = "Each sequence decides how much is computed for it: the model reads a few symbols at a time " +
      "onto a tape, and stops as soon as it has read enough.";
  const parity = new Parity(model);
  budget.listeners.push(() => parity.run());
}

class Parity {
  constructor(model) {
    this.root = $("#parity");
    this.length = model.length;
    this.bank = model.bank?.kind;
    this.latest = new Latest();
    this.pairs = [];
    this.reading = new Reading($(".reading", this.root), (token) => this.#highlight(token));
    this.reading.noun = (at) => `symbol ${at + 1}`;
    this.root.hidden = false;
    $("#add").addEventListener("click", () => this.edit([...this.symbols, 0]));
    $("#remove").addEventListener("click", () => this.edit(this.symbols.slice(0, -1)));
    $("#random").addEventListener("click", () => this.edit(this.#random()));
    $("#symbols").addEventListener("click", (event) => this.#cycle(event.target.closest("button")));
    new ResizeObserver(() => this.#arcs()).observe($("#arcs"));
    this.symbols = Array.from({ length: this.length }, (_, i) => SYMBOLS[(i * 2 + 2) % 3]);
    this.edit(this.symbols);
  }

  edit(symbols) {
    this.symbols = symbols;
    $("#add").disabled = symbols.length >= this.length;
    $("#remove").disabled = symbols.length <= 1;
    this.#buttons();
    this.run();
  }

  run() {
    const symbols = this.padded();
    const body = JSON.stringify({ symbols, ...Object.fromEntries(budget.query()) });
    this.root.setAttribute("aria-busy", "true");
    this.latest.run(
      (signal) => ask("/v1/parity", { method: "POST", headers: { "content-type": "application/json" }, body, signal }),
      (answer) => this.#show(answer, symbols),
      (error) => {
        this.root.removeAttribute("aria-busy");
        say($(".message", this.root), error.message);
      },
    );
  }

  #show(answer, symbols) {
    this.root.removeAttribute("aria-busy");
    say($(".message", this.root), "");
    this.pairs = answer.pairs ?? [];
    this.shown = symbols;
    const word = (odd) => (Number(odd) ? "odd" : "even");
    const right = Number(answer.prediction) === Number(answer.truth);
    const ones = symbols.filter((symbol) => symbol === 1).length;
    const verdict = [
      make("strong", { textContent: word(answer.prediction) }), ` ${percent(answer.probability)} sure. `,
      make("span", { className: right ? "right" : "wrong", textContent: right ? "✓ Right" : "✗ Wrong" }),
      `: ${plural(ones, "one")}, so the answer is ${word(answer.truth)}.`,
    ];
    $("#verdict").replaceChildren(...verdict);
    $(".figures", this.root).hidden = answer.tokens == null;
    if (answer.tokens != null) showFigures(this.root, answer, this.bank);
    this.reading.show(this.pairs, { threshold: budget.threshold, ...answer.budget }, (at) => make("em", { textContent: signed(symbols[at]) }));
    this.#arcs();
    announce($("#verdict").textContent);
  }

  padded() {
    return Array.from({ length: this.length }, (_, at) => this.symbols[at] ?? -1);
  }

  #random() {
    return this.symbols.map(() => SYMBOLS[Math.floor(Math.random() * 3)]);
  }

  #cycle(button) {
    if (!button) return;
    const at = Number(button.dataset.at);
    this.edit(this.symbols.map((symbol, i) => (i === at ? SYMBOLS[(symbol + 2) % 3] : symbol)));
  }

  /** Buttons stay, so that focus does too. */
  #buttons() {
    const row = $("#symbols");
    while (row.children.length < this.length) row.append(make("button", { type: "button" }));
    const missing = this.length - this.symbols.length;
    say($("#padding"), missing ? `This model takes ${this.length} symbols; the missing ${missing} are sent as −1.` : "");
    this.padded().forEach((symbol, at) => {
      const [button, disabled] = [row.children[at], at >= this.symbols.length];
      Object.assign(button, { textContent: signed(symbol), className: `symbol s${symbol + 1}`, disabled });
      button.dataset.at = at;
      button.setAttribute("aria-label", `Symbol ${at + 1} is ${signed(symbol)}; press to change`);
    });
  }

  #arcs() {
    const box = $("#arcs");
    const width = box.clientWidth;
    if (!width || !this.shown) return;
    const count = this.shown.length;
    $("#symbols").style.gridTemplateColumns = roomy(width / count) ? `repeat(${count}, minmax(0, 1fr))` : "";
    box.replaceChildren(drawArcs(width, this.shown, this.pairs));
    this.#highlight(this.reading.current ?? null);
  }

  #highlight(token) {
    emphasise(all(".arc", this.root), token);
  }
}
