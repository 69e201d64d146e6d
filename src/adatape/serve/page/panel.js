import { announce } from "./announce.js";
import { ask, Latest } from "./api.js";
import { budget, followThreshold } from "./budget.js";
import { $, all, make, say, shaded } from "./dom.js";
import { showFigures } from "./figures.js";
import { figure, percent, plural } from "./numbers.js";
import { outline } from "./patches.js";
import { decoded, paint } from "./picture.js";
import { emphasise, haltSentence, Reading } from "./tape.js";

const BARS = 5;

export class Panel {
  constructor(letter, model) {
    this.letter = letter;
    this.model = model;
    this.root = $("#panel").content.cloneNode(true).firstElementChild;
    this.latest = new Latest();
    this.picked = this.offered = null;
    this.reading = new Reading($(".reading", this.root), (token) => this.#highlight(token));
    this.reading.noun = (at) => this.#noun(at);
    this.root.setAttribute("aria-label", `Image ${letter}`);
    this.root.dataset.panel = letter;
    this.#title("");
    this.#acceptFiles();
  }

  offer(blob, title) {
    this.offered = { blob, title };
    this.run();
  }

  run() {
    const asked = this.offered ?? this.picked;
    if (!asked) return;
    const form = new FormData();
    form.append("image", asked.blob, asked.blob.name ?? "image.png");
    for (const [name, value] of [...budget.query(), ["top", BARS], ["tape", 1]]) form.append(name, value);
    this.root.setAttribute("aria-busy", "true");
    this.latest.run(
      async (signal) => {
        const answer = await ask("/v1/classify", { method: "POST", body: form, signal });
        const fresh = asked !== this.picked;
        return { answer, bitmap: fresh ? await decoded(asked.blob, answer.results[0].image) : this.bitmap };
      },
      (reply) => this.#accept(asked, reply),
      (error) => this.#refuse(asked, error),
    );
  }

  close() {
    this.latest.cancel();
    this.reading.stop();
    this.root.remove();
  }

  #accept(asked, { answer, bitmap }) {
    this.root.removeAttribute("aria-busy");
    say($(".message", this.root), "");
    this.bitmap = bitmap;
    this.picked = asked;
    this.offered = null;
    this.#title(asked.title);
    $(".answer", this.root).hidden = false;
    paint($("canvas", this.root), bitmap, this.model.input.size);
    this.#show(answer.results[0], answer.budget);
    followThreshold(answer.budget.threshold);
  }

  #refuse(asked, error) {
    this.root.removeAttribute("aria-busy");
    this.offered = null;
    const known = asked === this.picked || error.message.startsWith(asked.title);
    say($(".message", this.root), known ? error.message : `${asked.title}: ${error.message}`);
  }

  #show(result, used) {
    const [best] = result.top;
    const tape = result.tape ?? [];
    $(".guess .name", this.root).textContent = best.name;
    $(".guess .sure", this.root).textContent = `${percent(best.probability)} sure`;
    $(".bars", this.root).replaceChildren(...result.top.map(bar));
    const length = showFigures(this.root, result, this.model.bank.kind);
    this.#outline(tape, used);
    this.reading.show(tape, used, (at) => this.#thumb(at));
    announce(`Image ${this.letter}: ${best.name}, ${percent(best.probability)} sure. ${plural(length, "tape token")} read, ` +
      `${figure(result.gflops)} GFLOPs, ${figure(result.ms)} milliseconds.`);
  }

  #outline(tape, used) {
    const [svg, grid] = [$("svg", this.root), this.model.bank.grid];
    svg.replaceChildren();
    svg.setAttribute("aria-label", `Image ${this.letter}. ${haltSentence(tape, used)}`);
    if (grid && tape.length) outline(svg, tape, grid);
  }

  #highlight(token) {
    emphasise(all(".patch", this.root), token);
  }

  #noun(at) {
    const grid = this.model.bank.grid;
    return grid ? `row ${Math.floor(at / grid[1]) + 1} column ${(at % grid[1]) + 1}` : `bank token ${at}`;
  }

  #thumb(at) {
    const grid = this.model.bank.grid;
    if (!grid) return make("em", { textContent: `#${at}` });
    const whole = $("canvas", this.root);
    const [high, wide] = [whole.height / grid[0], whole.width / grid[1]];
    const thumb = make("canvas", { width: 44, height: 44 });
    const context = thumb.getContext("2d");
    context.imageSmoothingEnabled = Math.min(this.bitmap?.width ?? 0, this.bitmap?.height ?? 0) > 96;
    context.drawImage(whole, (at % grid[1]) * wide, Math.floor(at / grid[1]) * high, wide, high, 0, 0, 44, 44);
    return thumb;
  }

  #title(text) {
    $("h2", this.root).replaceChildren(make("span", { className: "letter", textContent: this.letter }), make("span", { textContent: text }));
  }

  #acceptFiles() {
    const [button, input] = [$(".drop", this.root), $("input[type=file]", this.root)];
    const take = (file) => file && this.offer(file, file.name);
    button.setAttribute("aria-label", `Choose an image for ${this.letter}, or drop one here`);
    button.addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      take(input.files[0]);
      input.value = ""; // so that the same file can be picked again
    });
    const hovering = (on) => this.root.classList.toggle("over", on);
    for (const [name, on] of [["dragover", true], ["dragleave", false], ["drop", false]])
      this.root.addEventListener(name, (event) => {
        event.preventDefault();
        hovering(on);
        if (name === "drop") take(event.dataTransfer.files[0]);
      });
  }
}

function bar({ name, probability }) {
  return shaded(make("li", {}, make("span", { textContent: name }), make("i"), make("b", { textContent: percent(probability) })), probability);
}
