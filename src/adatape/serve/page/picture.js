const SHORT_SIDE = 256 / 224; // as data/augment.py: images larger than the input lose this margin before the crop

/** Side of the centred square that the model sees, as a share of the image's short side. */
const kept = (short, size) => (short > size ? size / Math.round(size * SHORT_SIDE) : 1);

export async function decoded(blob, image) {
  const upright = await createImageBitmap(blob).catch(() => null);
  const turned = upright && image && upright.width !== upright.height && upright.width === image.height &&
    upright.height === image.width;
  return turned ? createImageBitmap(blob, { imageOrientation: "none" }) : upright;
}

export function paint(canvas, bitmap, size) {
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  canvas.classList.toggle("unshown", !bitmap);
  if (!bitmap) return;
  const side = Math.min(bitmap.width, bitmap.height) * kept(Math.min(bitmap.width, bitmap.height), size);
  context.imageSmoothingEnabled = side > 96;
  context.drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, canvas.width, canvas.height);
}
