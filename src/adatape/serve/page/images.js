import { setUpAtlas } from "./atlas.js";
import { budget } from "./budget.js";
import { $ } from "./dom.js";
import { setUpExamples } from "./examples.js";
import { openPanel, panels, setUpComparison } from "./panels.js";

export async function setUpImages(model) {
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
