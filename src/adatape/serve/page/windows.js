import { draw, make } from "./dom.js";
import { percent, plural } from "./numbers.js";
import { kept } from "./picture.js";

const numberHeight = (shown) => Math.min(15, Math.max(10, shown / 40)); // in pixels of the screen
const TALLEST = 36; // rem of a scene on the screen
const CANVAS = 1360; // widest scene in pixels; crops come from the file itself

/** The whole file, as the browser shows it. */
export function paintScene(canvas, bitmap, { width, height }) {
  canvas.width = Math.min(width, CANVAS);
  canvas.height = Math.max(1, Math.round((canvas.width * height) / width));
  Object.assign(canvas.parentElement.style, { aspectRatio: `${width} / ${height}`, maxInlineSize: `${(TALLEST * width) / height}rem` });
  canvas.classList.toggle("unshown", !bitmap);
  if (bitmap) canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
}

/** Frames in pixels of the file, numbered in reading order; the first lies on top, and numbers on all frames. */
export function outlineWindows(svg, tape, image) {
  svg.setAttribute("viewBox", `0 0 ${image.width} ${image.height}`);
  const shown = svg.clientWidth || image.width;
  const size = (numberHeight(shown) * image.width) / shown;
  svg.append(...tape.map(frame).reverse(), ...tape.map((token, t) => number(token, t, image, size)).reverse());
}

function frame({ box: [[top, left, high, wide]], weight: [weight] }, t) {
  const [group, place] = [marked(t), { x: left, y: top, width: wide, height: high }];
  group.append(draw("title", {}, `Window ${t + 1}, score ${percent(weight)}`),
    draw("rect", { class: "edge", ...place }), draw("rect", { class: "frame", ...place }));
  return group;
}

function number({ box: [[top, left, high]] }, t, { width }, usual) {
  const size = t ? usual : 1.3 * usual;
  const [x, y] = [Math.min(Math.max(left, 0), width - size), top > size * 1.2 ? top - size * 1.15 : top + high];
  const group = marked(t);
  group.append(draw("rect", { class: "chip", x, y, width: size, height: size * 1.15 }),
    draw("text", { x: x + size / 2, y: y + size * 0.94, "font-size": size }, `${t + 1}`));
  return group;
}

const marked = (t) => draw("g", { class: "patch window", "data-of": t });

/** A window with as many pixels as the model saw of it; what lies outside of the image stays grey. */
export function cropped(bitmap, [top, left, high, wide], side) {
  const crop = make("canvas", { width: side, height: side, className: "crop" });
  const context = crop.getContext("2d");
  context.fillStyle = "rgb(128 128 128)";
  context.fillRect(0, 0, side, side);
  context.imageSmoothingQuality = "high";
  if (bitmap) context.drawImage(bitmap, left, top, wide, high, 0, 0, side, side);
  return crop;
}

export function stopSentence(tape, { steps, threshold }) {
  const read = `${plural(tape.length, "window")} of at most ${steps}`;
  if (tape.length >= steps) return `Read ${read}, all that the budget allows.`;
  const below = threshold ? `below ${percent(threshold)}` : "too low";
  return tape.length ? `Stopped after ${read}: the next window's score was ${below}.` : `No window was read: every score was ${below}.`;
}

/** How a file came to the model's size; empty if it has that size. */
export function fittedSentence({ width, height }, size, window) {
  if (!Array.isArray(size)) return squareSentence({ width, height }, size, window);
  const [high, wide] = size;
  if (width === wide && height === high) return "";
  const ratio = Math.max(height / high, width / wide);
  const seen = `${Math.round(width / ratio)} × ${Math.round(height / ratio)}`;
  const padded = Math.round(width / ratio) === wide && Math.round(height / ratio) === high ? "" : `, with grey borders up to ${wide} × ${high}`;
  return `The model saw this image of ${width} × ${height} pixels at ${seen}${padded}. ` +
    `A window covers ${Math.round(window * ratio)} × ${Math.round(window * ratio)} pixels of the file; windows below show what the model saw.`;
}

function squareSentence({ width, height }, size, window) {
  if (width === size && height === size) return "";
  const short = Math.min(width, height);
  const side = short * kept(short, size);
  const covered = Math.round((window * side) / size);
  return `The model saw the middle square of this image of ${width} × ${height} pixels, ${Math.round(side)} of them wide, at ` +
    `${size} × ${size}. A window covers ${covered} × ${covered} pixels of the file.`;
}
