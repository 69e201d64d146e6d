import { announce } from "./announce.js";
import { ask, Latest } from "./api.js";
import { budget, followThreshold } from "./budget.js";
import { $, all, make, say, shaded } from "./dom.js";
import { showFigures } from "./figures.js";
import { chance, figure, percent, plural } from "./numbers.js";
import { doubtSentence, farSentence } from "./likeness.js";
import { outline } from "./patches.js";
import { blobOf, decoded, paint, paintFile, paintSeen, seenSentence, smooth } from "./picture.js";
import { emphasise, haltSentence, Reading } from "./tape.js";
import { nameUnit, unitName, work } from "./work.js";
import { cropped, fittedSentence, outlineWindows, paintScene, stopSentence } from "./windows.js";

const BARS = 5;

export class Panel {
  constructor(letter, model) {
    this.letter = letter;
    this.model = model;
    this.windows = model.bank?.kind === "windows";
    this.root = $("#panel").content.cloneNode(true).firstElementChild;
    this.latest = new Latest();
    this.picked = this.offered = null;
    this.reading = new Reading($(".reading", this.root), (token) => this.#highlight(token));
    this.reading.noun = (at) => this.#noun(at);
    if (this.windows) this.#nameWindows();
    nameUnit(this.root);
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
    const top = this.model.several_labels ? [] : [["top", BARS]];
    const fresh = asked !== this.picked;
    for (const [name, value] of [...budget.query(), ...top, ["tape", 1], ...(fresh ? [["seen", 1]] : [])]) form.append(name, value);
    this.root.setAttribute("aria-busy", "true");
    this.latest.run(
      async (signal) => {
        const answer = await ask("/v1/classify", { method: "POST", body: form, signal });
        const [result] = answer.results;
        if (!fresh) return { answer };
        return { answer, look: { bitmap: await decoded(asked.blob, result.image), likeness: result.likeness,
          seen: result.seen ? await decoded(blobOf(result.seen)) : null } };
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

  #accept(asked, { answer, look }) {
    this.root.removeAttribute("aria-busy");
    say($(".message", this.root), "");
    this.picked = asked;
    this.offered = null;
    this.#title(asked.title);
    $(".answer", this.root).hidden = false;
    if (look) this.#look(look, answer.results[0].image, asked.blob instanceof File);
    this.root.dispatchEvent(new CustomEvent("picked", { bubbles: true }));
    this.#show(answer.results[0], answer.budget);
    followThreshold(answer.budget.threshold);
  }

  /** What is drawn of an image, whatever the budget. */
  #look({ bitmap, seen, likeness }, image, brought) {
    const [canvas, { size }] = [$(".scene canvas", this.root), this.model.input];
    this.bitmap = bitmap;
    if (this.windows) paintScene(canvas, bitmap, image);
    else if (seen) paintSeen(canvas, seen);
    else paint(canvas, bitmap, size);
    const resized = Boolean(seen && bitmap) && !this.windows && (image.width !== size || image.height !== size);
    $(".file", this.root).hidden = !resized;
    if (resized) paintFile($(".file canvas", this.root), bitmap, size);
    $(".file figcaption", this.root).textContent = resized ? seenSentence(image, this.model.input) : "";
    say($(".far", this.root), farSentence(likeness));
    say($(".doubt", this.root), brought && likeness !== undefined ? doubtSentence(likeness) : "");
  }

  #refuse(asked, error) {
    this.root.removeAttribute("aria-busy");
    this.offered = null;
    const known = asked === this.picked || error.message.startsWith(asked.title);
    say($(".message", this.root), known ? error.message : `${asked.title}: ${error.message}`);
  }

  #show(result, used) {
    const { name, sure } = this.model.several_labels ? labelsOf(result.top) : bestOf(result.top);
    const tape = result.tape ?? [];
    $(".guess .name", this.root).textContent = name;
    $(".guess .sure", this.root).textContent = sure;
    $(".bars", this.root).replaceChildren(...result.top.map(bar));
    const length = showFigures(this.root, result, this.model.bank.kind, used.steps);
    const sentence = this.windows ? stopSentence(tape, used) : haltSentence(tape, used);
    this.#outline(tape, sentence, result.image);
    this.reading.show(tape, used, (at, token, k) => this.#thumb(at, token, k), sentence);
    if (this.windows) say($(".fitted", this.root), fittedSentence(result.image, this.model.input.size, this.model.bank.window));
    announce(`Image ${this.letter}: ${name}, ${sure}. ${plural(length, this.windows ? "window" : "tape token")} read, ` +
      `${work(result.gflops)} ${unitName()}, ${figure(result.ms)} milliseconds.`);
  }

  #outline(tape, sentence, image) {
    const [svg, grid] = [$("svg", this.root), this.model.bank.grid];
    svg.replaceChildren();
    svg.setAttribute("aria-label", `Image ${this.letter}. ${sentence}`);
    if (this.windows) outlineWindows(svg, tape, image);
    else if (grid && tape.length) outline(svg, tape, grid);
  }

  #highlight(token) {
    emphasise(all(".patch", this.root), token);
  }

  #noun(at) {
    const grid = this.model.bank.grid;
    return grid ? `row ${Math.floor(at / grid[1]) + 1} column ${(at % grid[1]) + 1}` : `bank token ${at}`;
  }

  #nameWindows() {
    $(".figures dt", this.root).textContent = "windows read";
    $(".reading h3", this.root).textContent = "Windows and their scores, in reading order";
    for (const button of all(".steppers [aria-label]", this.root))
      button.setAttribute("aria-label", button.getAttribute("aria-label").replace("token", "window"));
    this.reading.describe = (t, token) => `Window ${t + 1}, score ${percent(token.weight[0])}`;
  }

  #thumb(at, token, k) {
    if (this.windows) return cropped(this.bitmap, token.box[k], this.model.bank.window);
    const grid = this.model.bank.grid;
    if (!grid) return make("em", { textContent: `#${at}` });
    const whole = $(".scene canvas", this.root);
    const [high, wide] = [whole.height / grid[0], whole.width / grid[1]];
    const thumb = make("canvas", { width: 44, height: 44 });
    const context = thumb.getContext("2d");
    context.imageSmoothingEnabled = smooth(this.model.input.size);
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

function bestOf([best]) {
  return { name: best.name, sure: `${chance(best.probability)} sure` };
}

function labelsOf(labels) {
  const present = labels.filter((label) => label.present);
  return { name: present.map((label) => label.name).join(", ") || "no label", sure: `${present.length} of ${plural(labels.length, "label")}` };
}

function bar({ name, probability, present }) {
  const item = make("li", { className: present ? "present" : "" });
  item.append(make("span", { textContent: name }), make("i"), make("b", { textContent: chance(probability) }));
  return shaded(item, probability);
}
