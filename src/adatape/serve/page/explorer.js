import { ask } from "./api.js";
import { setUpBudget } from "./budget.js";
import { $ } from "./dom.js";
import { setUpImages } from "./images.js";
import { punch, showFacts } from "./masthead.js";
import { setUpParity } from "./parity.js";
import { setUnit } from "./work.js";

async function start() {
  $("#trouble").hidden = true;
  try {
    const model = await ask("/v1/model");
    setUnit(model);
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
