const SHORT_SIDE = 256 / 224; // as data/augment.py: images larger than the input lose this margin before the crop

/** Side of the centred square that the model sees, as a share of the image's short side. */
export const kept = (short, size) => (short > size ? size / Math.round(size * SHORT_SIDE) : 1);

/** Height and width of the model's input, which is a square of a given side, or a rectangle. */
export const sides = (size) => (Array.isArray(size) ? [...size] : [size, size]);

export function blobOf(url) {
  const [head, body] = url.split(",");
  const bytes = Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0));
  return new Blob([bytes], { type: head.match(/^data:([^;]*)/)[1] });
}

export async function decoded(blob, image) {
  const upright = await createImageBitmap(blob).catch(() => null);
  const turned = upright && image && upright.width !== upright.height && upright.width === image.height &&
    upright.height === image.width;
  return turned ? createImageBitmap(blob, { imageOrientation: "none" }) : upright;
}

export function paint(canvas, bitmap, size) {
  const context = canvas.getContext("2d");
  const [height, width] = sides(size);
  canvas.height = Math.round((canvas.width * height) / width);
  canvas.parentElement.style.aspectRatio = `${width} / ${height}`;
  context.clearRect(0, 0, canvas.width, canvas.height);
  canvas.classList.toggle("unshown", !bitmap);
  if (!bitmap) return;
  if (Array.isArray(size)) return paintWhole(context, bitmap);
  const side = Math.min(bitmap.width, bitmap.height) * kept(Math.min(bitmap.width, bitmap.height), size);
  context.imageSmoothingEnabled = smooth(side);
  context.drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, canvas.width, canvas.height);
}

const SMOOTH = 96; // pixels of a side from which on single ones need not be told apart
export const smooth = (side) => side > SMOOTH;

/** The very pixels that the model got. */
export function paintSeen(canvas, seen) {
  canvas.height = canvas.width;
  canvas.parentElement.style.aspectRatio = "1";
  canvas.classList.remove("unshown");
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = smooth(seen.width);
  context.drawImage(seen, 0, 0, canvas.width, canvas.height);
}

const FILE = 320; // longest side of the file's small picture

/** The whole file, with a frame around what the model saw of it. */
export function paintFile(canvas, bitmap, size) {
  const share = FILE / Math.max(bitmap.width, bitmap.height);
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * share)));
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = share < 1 || smooth(bitmap.width);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const side = Math.min(canvas.width, canvas.height) * kept(Math.min(bitmap.width, bitmap.height), size);
  const place = [(canvas.width - side) / 2, (canvas.height - side) / 2, side, side];
  for (const [width, colour] of [[8, "#0b1413"], [4, "#f3cf4a"]]) {
    Object.assign(context, { lineWidth: width, strokeStyle: colour });
    context.strokeRect(...place);
  }
}

/** How a file came to the model's input. */
export function seenSentence({ width, height }, { size, channels }) {
  const grey = channels === 1 ? " in grey" : "";
  return `The file has ${width} × ${height} pixels. The model saw the framed square of it as ${size} × ${size}${grey}, which is drawn large.`;
}

/** The whole image between grey borders, as data/letterbox.py fits it. */
function paintWhole(context, bitmap) {
  const { width, height } = context.canvas;
  const share = Math.min(width / bitmap.width, height / bitmap.height);
  const [wide, high] = [bitmap.width * share, bitmap.height * share];
  context.fillStyle = "rgb(128 128 128)";
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, (width - wide) / 2, (height - high) / 2, wide, high);
}
