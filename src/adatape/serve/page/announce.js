import { $ } from "./dom.js";

let spokenTimer = 0;

export function announce(text) {
  clearTimeout(spokenTimer);
  spokenTimer = setTimeout(() => ($("#spoken").textContent = text), 250);
}
