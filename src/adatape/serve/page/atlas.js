import { ask } from "./api.js";
import { budget, showBudget } from "./budget.js";
import { $, all, draw, make, shaded } from "./dom.js";
import { figure, percent, plural } from "./numbers.js";

const MAPS = 6;
const atlas = [];

export function setUpAtlas(model) {
  if (model.bank?.kind !== "input" || !budget.trained) return; // only its tokens are patches with a place
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
  $("#atlas-note").textContent = `One square per budget. The strongest colour stands for ${most}.`;
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

function spread(trained) {
  const count = Math.min(MAPS, trained);
  return [...new Set(Array.from({ length: count }, (_, i) => Math.round(((i + 1) * trained) / count)))];
}
