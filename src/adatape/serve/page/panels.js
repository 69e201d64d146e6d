import { $ } from "./dom.js";
import { Panel } from "./panel.js";

export const panels = new Map();
export const target = () => panels.get($("#target input:checked").value) ?? panels.get("A");

function setTarget(letter) {
  $(`#target input[value=${letter}]`).checked = true;
}

export function openPanel(letter, model) {
  const panel = new Panel(letter, model);
  panels.set(letter, panel);
  $("#panels").append(panel.root);
  $("#panels").dataset.count = panels.size;
  return panel;
}

export function setUpComparison(model, examples) {
  const button = $("#compare");
  button.addEventListener("click", () => {
    const panel = openPanel("B", model);
    const close = $(".close", panel.root);
    close.hidden = false;
    close.setAttribute("aria-label", "Remove image B");
    close.addEventListener("click", () => {
      panel.close();
      panels.delete("B");
      $("#panels").dispatchEvent(new CustomEvent("picked"));
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
