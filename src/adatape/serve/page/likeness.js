const COMPARED = "brightness, contrast, detail, black and white areas, and colour";

/** A warning where an image looks unlike those of the model's set; empty where it does not, or where that is unknown. */
export function farSentence(likeness) {
  if (!likeness?.far) return "";
  return `This image looks unlike those that the model knows, most of all by its ${likeness.most}. Do not rely on the answer.`;
}

/** What the comparison cannot tell, for an image that a visitor brought. */
export function doubtSentence(likeness) {
  if (!likeness) return "Whether this image is like those that the model knows cannot be told: they are not at hand here.";
  if (likeness.far) return `Compared by ${COMPARED} with ${likeness.images} images: it lies farther out than 99 % of them.`;
  return `Not unusual in ${COMPARED}. Whether it shows anything that the model knows cannot be told.`;
}
