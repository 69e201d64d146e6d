const DEBOUNCE = 120;
const SHORT_SIDE = 256 / 224; // as data/augment.py: images larger than the input lose this margin before the crop
const BARS = 5;
const THUMBS = 6;
const MAPS = 6;

const $ = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const sum = (values) => values.reduce((a, b) => a + b, 0);
const percent = (share) => {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  if (share < 1 && share > 0.999) return "> 99.9 %";
  return `${(100 * share).toFixed((share > 0.99 || share < 0.1) && share % 1 ? 1 : 0)} %`;
};
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function draw(tag, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

function shaded(node, share) {
  node.style.setProperty("--share", `${(100 * share).toFixed(1)}%`);
  return node;
}

function figure(value) {
  if (value == null) return "–";
  if (value === 0) return "0";
  return value >= 100 ? value.toFixed(0) : Number(value.toPrecision(3)).toString();
}

function many(value) {
  for (const [unit, size] of [["billion", 1e9], ["million", 1e6], ["thousand", 1e3]])
    if (value >= size) return `${figure(value / size)} ${unit}`;
  return `${value}`;
}

function say(node, text) {
  node.textContent = text;
  node.hidden = !text;
}

async function ask(path, options = {}) {
  const token = sessionStorage.getItem("token");
  let reply;
  try {
    reply = await fetch(path, { ...options, headers: { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server did not answer. It may have stopped, or it cut off an upload that is too large.");
  }
  const body = await reply.json().catch(() => ({}));
  if (reply.status === 401) $("#token").hidden = false;
  if (!reply.ok) throw new Error(typeof body.detail === "string" ? body.detail : `The server answered ${reply.status}.`);
  return body;
}

/** Runs one request at a time; a newer one makes the older one's reply count for nothing. */
class Latest {
  #turn = 0;
  #controller = null;

  cancel() {
    this.#turn++;
    this.#controller?.abort();
  }

  async run(work, done, failed) {
    this.cancel();
    const mine = this.#turn;
    this.#controller = new AbortController();
    try {
      const value = await work(this.#controller.signal);
      if (mine === this.#turn) done(value);
    } catch (error) {
      if (mine === this.#turn) failed(error);
    }
  }
}

const budget = { steps: 0, trained: 0, threshold: null, listeners: [], timer: 0 };
budget.query = () => {
  const named = { steps: budget.trained ? budget.steps : null, threshold: budget.threshold };
  return Object.entries(named).filter(([, value]) => value !== null);
};
budget.changed = () => {
  clearTimeout(budget.timer);
  budget.timer = setTimeout(() => budget.listeners.forEach((listener) => listener()), DEBOUNCE);
};

function setUpBudget({ budget: trained, default: preset }, tape) {
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

function showBudget() {
  const steps = $("#steps");
  $("#steps-value").textContent = `${budget.steps} of ${budget.trained}`;
  steps.setAttribute("aria-valuetext", `${budget.steps} of ${budget.trained}`);
  for (const input of all("input[type=range]"))
    shaded(input, (input.value - input.min) / Math.max(input.max - input.min, 1e-9));
  $("#threshold-value").textContent = budget.threshold === null ? "follows the budget" : figure(budget.threshold);
  for (const map of all("#maps > li")) map.classList.toggle("now", Number(map.dataset.steps) === budget.steps);
}

/** What the server used where the visitor left the threshold to it. */
function followThreshold(threshold) {
  if (budget.threshold !== null || !threshold) return;
  $("#threshold").value = threshold;
  showBudget();
  $("#threshold-value").textContent = `${figure(threshold)}, follows the budget`;
}

function haltSentence(tape, used) {
  const steps = used.steps ?? budget.steps;
  if (!tape.length) return steps ? "This model reads no tape." : "Nothing is read: at this budget it is a plain Transformer.";
  const total = figure(sum(tape.map((token) => Math.max(...token.weight))));
  const limit = used.threshold == null ? null : figure(used.threshold);
  const read = `${tape.length} of ${steps}`;
  if (tape.length < steps)
    return `Stopped after ${read}: the largest weights of these tokens sum to ${total}` +
      (limit ? `, and the threshold is ${limit}.` : ".");
  return `Read ${read}, all that the budget allows: the largest weights sum to ${total}` +
    (limit ? ` (threshold ${limit}).` : ".");
}

/** The tape as a strip of tokens that can be pointed at, stepped through and played. */
class Reading {
  constructor(root, highlight) {
    root.append($("#reading").content.cloneNode(true));
    this.root = root;
    this.highlight = highlight;
    this.pinned = null;
    this.tape = [];
    root.addEventListener("click", (event) => this.#clicked(event));
    for (const name of ["pointerover", "focusin"])
      root.addEventListener(name, (event) => this.#point(event.target.closest("[data-token]")));
    $(".tape", root).addEventListener("pointerleave", () => this.select(this.pinned));
    $(".tape", root).addEventListener("focusout", () => this.select(this.pinned));
  }

  show(tape, used, part) {
    this.stop();
    const before = this.pinned;
    this.tape = tape;
    const steps = used.steps ?? budget.steps;
    const focused = document.activeElement?.closest?.(".tape") === $(".tape", this.root)
      ? document.activeElement.dataset.token : null;
    const blanks = Array.from({ length: Math.max(0, steps - tape.length) }, (_, i) => this.#blank(tape.length + i));
    $(".tape", this.root).replaceChildren(...tape.map((token, t) => this.#cell(token, t, part)), ...blanks);
    $(".halt", this.root).textContent = haltSentence(tape, used);
    this.#meter(used.threshold);
    for (const node of all(".steppers, .scale", this.root)) node.hidden = tape.length === 0;
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
    const { index, weight } = this.tape[t];
    return `Token ${t + 1} merges ${index.map((at, k) => `${this.noun?.(at) ?? at} (${percent(weight[k])})`).join(", ")}`;
  }

  #cell(token, t, part) {
    const parts = token.index.slice(0, THUMBS).map((at, k) =>
      shaded(make("span", { className: "part" }, part(at), make("b", { textContent: percent(token.weight[k]) })),
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

/** Where a weight stands between the lightest and the heaviest of one tape. */
function heat(tape) {
  const weights = tape.flatMap((token) => token.weight);
  const [low, high] = [Math.min(...weights), Math.max(...weights)];
  return (weight) => (high > low ? (weight - low) / (high - low) : 1);
}

let spokenTimer = 0;
function announce(text) {
  clearTimeout(spokenTimer);
  spokenTimer = setTimeout(() => ($("#spoken").textContent = text), 250);
}

/** Side of the centred square that the model sees, as a share of the image's short side. */
const kept = (short, size) => (short > size ? size / Math.round(size * SHORT_SIDE) : 1);

async function decoded(blob, image) {
  const upright = await createImageBitmap(blob).catch(() => null);
  const turned = upright && image && upright.width !== upright.height && upright.width === image.height &&
    upright.height === image.width;
  return turned ? createImageBitmap(blob, { imageOrientation: "none" }) : upright;
}

function paint(canvas, bitmap, size) {
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  canvas.classList.toggle("unshown", !bitmap);
  if (!bitmap) return;
  const side = Math.min(bitmap.width, bitmap.height) * kept(Math.min(bitmap.width, bitmap.height), size);
  context.imageSmoothingEnabled = side > 96;
  context.drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, canvas.width, canvas.height);
}

class Panel {
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

  /** Everything the tape did not read is dimmed; what it read is framed, numbered, coloured by weight. */
  #outline(tape, used) {
    const svg = $("svg", this.root);
    const grid = this.model.bank.grid;
    svg.replaceChildren();
    svg.setAttribute("aria-label", `Image ${this.letter}. ${haltSentence(tape, used)}`);
    if (!grid || !tape.length) return;
    const [rows, columns] = grid;
    svg.setAttribute("viewBox", `0 0 ${columns} ${rows}`);
    const holes = tape.flatMap((token) => token.index).map((at) => `M${at % columns} ${Math.floor(at / columns)}h1v1h-1z`);
    svg.append(draw("path", { class: "scrim", "fill-rule": "evenodd", d: `M0 0h${columns}v${rows}h-${columns}z${holes.join("")}` }));
    const share = heat(tape);
    tape.forEach((token, t) => token.index.forEach((at, k) => {
      const patch = draw("g", { class: "patch", "data-of": t, transform: `translate(${at % columns} ${Math.floor(at / columns)})` });
      const text = columns > 12 ? 0.62 : columns > 5 ? 0.36 : 0.24;
      patch.append(
        draw("title", {}, `Token ${t + 1}, weight ${percent(token.weight[k])}`),
        draw("rect", { class: "frame", width: 1, height: 1 }),
        draw("rect", { class: "chip", width: text * (t > 8 ? 1.5 : 1.1), height: text * 1.1 }),
        draw("text", { x: text * (t > 8 ? 0.75 : 0.55), y: text * 0.9, "font-size": text * 0.95 }, `${t + 1}`),
      );
      svg.append(shaded(patch, share(token.weight[k])));
    }));
  }

  #highlight(token) {
    for (const patch of all(".patch", this.root)) {
      patch.classList.toggle("on", Number(patch.dataset.of) === token);
      patch.classList.toggle("off", token !== null && Number(patch.dataset.of) !== token);
    }
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

function showFigures(root, { tokens, tape_length: length = 0, gflops, ms }, bank) {
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

const panels = new Map();

function openPanel(letter, model) {
  const panel = new Panel(letter, model);
  panels.set(letter, panel);
  $("#panels").append(panel.root);
  $("#panels").dataset.count = panels.size;
  return panel;
}

function setTarget(letter) {
  $(`#target input[value=${letter}]`).checked = true;
}

const target = () => panels.get($("#target input:checked").value) ?? panels.get("A");

function setUpComparison(model, examples) {
  const button = $("#compare");
  button.addEventListener("click", () => {
    const panel = openPanel("B", model);
    const close = $(".close", panel.root);
    Object.assign(close, { hidden: false });
    close.setAttribute("aria-label", "Remove image B");
    close.addEventListener("click", () => {
      panel.close();
      panels.delete("B");
      $("#panels").dataset.count = 1;
      $("#target").hidden = true;
      button.hidden = false;
      setTarget("A");
      button.focus();
    });
    button.hidden = true;
    $("#target").hidden = !examples.length;
    setTarget("B");
    if (examples.length > 1) panel.offer(examples[1].blob, examples[1].title);
    $(".drop", panel.root).focus();
  });
}

function blobOf(url) {
  const [head, body] = url.split(",");
  const bytes = Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0));
  return new Blob([bytes], { type: head.match(/^data:([^;]*)/)[1] });
}

async function setUpExamples() {
  const { examples } = await ask("/v1/examples?count=12").catch(() => ({ examples: [] }));
  const picks = examples.map(({ name, image, original }, i) => ({ blob: blobOf(original ?? image), title: `example ${i + 1}, labelled ${name}`, image, name }));
  $("#examples").replaceChildren(...picks.map((pick) => {
    const button = make("button", { type: "button" }, make("img", { src: pick.image, alt: "" }));
    button.setAttribute("aria-label", `Use ${pick.title}`);
    button.addEventListener("click", () => target().offer(pick.blob, pick.title));
    return make("li", {}, button);
  }));
  $("#shelf").hidden = !picks.length;
  return picks;
}

const atlas = [];

function spread(trained) {
  const count = Math.min(MAPS, trained);
  return [...new Set(Array.from({ length: count }, (_, i) => Math.round(((i + 1) * trained) / count)))];
}

function setUpAtlas(model) {
  if (!model.bank?.kind || !budget.trained) return;
  $("#atlas").hidden = false;
  for (const input of all("input[name=measure]")) input.addEventListener("change", showAtlas);
  const seen = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    seen.disconnect();
    loadAtlas();
  }, { rootMargin: "200px" });
  seen.observe($("#atlas"));
}

/** One after another: each is a pass over the data set. */
async function loadAtlas() {
  for (const steps of spread(budget.trained)) {
    try {
      atlas.push({ steps, ...(await ask(`/v1/heatmap?steps=${steps}`)) });
    } catch (error) {
      $("#atlas-note").textContent = `No map: ${error.message}`;
      return;
    }
    showAtlas();
  }
}

function showAtlas() {
  const measure = $("input[name=measure]:checked").value;
  const shares = atlas.map((map) => map[measure].map((value) => value / Math.max(map.images, 1)));
  const top = Math.max(...shares.flat(), 1e-9);
  $("#maps").replaceChildren(...atlas.map((map, i) => smallMap(map, shares[i], top, measure)));
  const most = measure === "counts" ? `${percent(top)} of ${atlas[0].images} images` : `a weight of ${figure(top)} per image`;
  $("#atlas-note").textContent = `One square per budget. The darkest patch stands for ${most}.`;
  showBudget();
}

function smallMap(map, shares, top, measure) {
  const columns = map.grid?.[1] ?? Math.ceil(Math.sqrt(shares.length));
  const rows = Math.ceil(shares.length / columns);
  const svg = draw("svg", { viewBox: `0 0 ${columns} ${rows}`, role: "img", "shape-rendering": "crispEdges" });
  shares.forEach((share, at) => {
    const cell = shaded(draw("rect", { x: at % columns, y: Math.floor(at / columns), width: 1, height: 1 }), share / top);
    cell.append(draw("title", {}, measure === "counts" ? percent(share) : figure(share)));
    svg.append(cell);
  });
  const best = shares.indexOf(Math.max(...shares));
  svg.setAttribute("aria-label", `Budget ${map.steps}: most at row ${Math.floor(best / columns) + 1}, column ${(best % columns) + 1}`);
  const item = make("li", {}, svg, make("span", { textContent: plural(map.steps, "token") }));
  item.dataset.steps = map.steps;
  return item;
}

const SYMBOLS = [-1, 0, 1];
const signed = (symbol) => `${symbol}`.replace("-", "−");

class Parity {
  constructor(model) {
    this.root = $("#parity");
    this.length = model.length;
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
    if (answer.tokens != null) showFigures(this.root, answer, true);
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
    const pitch = width / this.shown.length;
    const roomy = pitch >= 38; // then the arcs end on the buttons themselves
    const dot = roomy ? 0 : clamp(pitch * 0.36, 2.5, 13);
    $("#symbols").style.gridTemplateColumns = roomy ? `repeat(${this.shown.length}, minmax(0, 1fr))` : "";
    const spans = this.pairs.map(({ index }) => Math.max(...index) - Math.min(...index));
    const tall = clamp(Math.max(...spans, 1) * pitch * 0.5, 40, 170);
    const floor = tall + 22;
    const x = (at) => (at + 0.5) * pitch;
    const svg = draw("svg", { width, height: floor + 2 * dot + 8, viewBox: `0 0 ${width} ${floor + 2 * dot + 8}`, role: "img" });
    svg.setAttribute("aria-label", `${plural(this.pairs.length, "group")} of symbols read, in order`);
    const top = Math.max(...spans, 1);
    const lifts = this.pairs.map((_, t) => 14 + (tall - 14) * (spans[t] / top));
    this.pairs.forEach((pair, t) => svg.append(this.#arc(pair, t, x, floor, lifts[t])));
    if (!roomy) this.shown.forEach((symbol, at) => svg.append(...this.#dot(symbol, x(at), floor + dot + 4, dot)));
    box.replaceChildren(svg);
    this.#highlight(this.reading.current ?? null);
  }

  #arc({ index, weight }, t, x, floor, lift) {
    const group = shaded(draw("g", { class: "arc", "data-of": t }), heat(this.pairs)(Math.max(...weight)));
    const [low, high] = [Math.min(...index), Math.max(...index)];
    const middle = (x(low) + x(high)) / 2;
    for (const at of index.filter((at) => at !== low))
      group.append(draw("path", { d: `M${x(low)} ${floor} C${x(low)} ${floor - lift * 1.33} ${x(at)} ${floor - lift * 1.33} ${x(at)} ${floor}` }));
    index.forEach((at, k) => group.append(draw("circle", { cx: x(at), cy: floor, r: 1.5 + 3 * weight[k] })));
    group.append(draw("circle", { class: "chip", cx: middle, cy: floor - lift, r: 8 }));
    group.append(draw("text", { x: middle, y: floor - lift + 3.5 }, `${t + 1}`));
    return group;
  }

  #dot(symbol, x, y, r) {
    const text = r > 8 ? [draw("text", { x, y: y + 4, class: `digit s${symbol + 1}` }, signed(symbol))] : [];
    return [draw("circle", { class: `dot s${symbol + 1}`, cx: x, cy: y, r }), ...text];
  }

  #highlight(token) {
    for (const arc of all(".arc", this.root)) {
      arc.classList.toggle("on", Number(arc.dataset.of) === token);
      arc.classList.toggle("off", token !== null && Number(arc.dataset.of) !== token);
    }
  }
}

/** The page's name in the seven-bit code of punched tape. */
function punch(text) {
  const svg = draw("svg", { viewBox: `0 0 ${text.length * 4} 34`, preserveAspectRatio: "xMinYMid slice" });
  [...text].forEach((letter, column) => {
    const holes = [...letter.charCodeAt(0).toString(2).padStart(8, "0")];
    holes.forEach((bit, row) => bit === "1" && svg.append(draw("circle", { cx: column * 4 + 2, cy: row * 4 + 2 + (row > 4 ? 2 : 0), r: 1.4 })));
    svg.append(draw("circle", { cx: column * 4 + 2, cy: 21, r: 0.7 }));
  });
  $("#punched").replaceChildren(svg);
}

function showFacts(model) {
  const facts = [model.name, `${many(model.parameters)} parameters`];
  if (model.accuracy != null) facts.push(`${percent(model.accuracy)} right on its test set`);
  if (model.kind === "image") facts.push(`${model.classes.length} classes`, `${model.input.size} × ${model.input.size} pixels`);
  else facts.push(`${model.length} symbols`);
  $("#facts").replaceChildren(...facts.map((fact) => make("span", { textContent: fact })));
}

async function setUpImages(model) {
  $("#images").hidden = false;
  const panel = openPanel("A", model);
  const examples = [];
  budget.listeners.push(() => panels.forEach((each) => each.run()));
  setUpComparison(model, examples);
  examples.push(...(await setUpExamples()));
  $("#target").hidden = !panels.has("B") || !examples.length;
  setUpAtlas(model);
  if (examples.length && !panel.offered && !panel.picked) panel.offer(examples[0].blob, examples[0].title);
}

function setUpParity(model) {
  $("#lead").textContent = "Each sequence decides how much is computed for it: the model reads a few symbols at a time " +
    "onto a tape, and stops as soon as it has read enough.";
  const parity = new Parity(model);
  budget.listeners.push(() => parity.run());
}

async function start() {
  $("#trouble").hidden = true;
  try {
    const model = await ask("/v1/model");
    showFacts(model);
    setUpBudget(model, Boolean(model.bank?.kind) || model.kind === "parity");
    if (model.kind === "parity") setUpParity(model);
    else await setUpImages(model);
  } catch (error) {
    $("#trouble p").textContent = error.message;
    $("#trouble").hidden = false;
    $("#token input").focus();
  }
}

punch("ADATAPE EXPLORER ".repeat(8));
$("#token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", $("#token input").value);
  location.reload();
});
$("#again").addEventListener("click", () => location.reload());
for (const name of ["dragover", "drop"]) document.addEventListener(name, (event) => event.preventDefault());
start();
