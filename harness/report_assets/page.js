"use strict";
// Sorting, filtering by verdict, the theme, and printing with everything unfolded. All that the page
// says is there without this script.
const root = document.documentElement;

function value(row, column) {
  const cell = row.cells[column];
  if (!cell) return "";
  const given = cell.dataset.sort ?? cell.textContent.trim();
  const number = Number(given);
  return given !== "" && !Number.isNaN(number) ? number : given;
}

function order(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === "number") return -1;
  if (typeof b === "number") return 1;
  return a.localeCompare(b, undefined, { numeric: true });
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => (down ? -1 : 1) * order(value(a, column), value(b, column)));
      table.tBodies[0].append(...rows);
    });
  });
}

const filters = [...document.querySelectorAll(".bar button")];
for (const filter of filters) {
  filter.addEventListener("click", () => {
    const on = filter.getAttribute("aria-pressed") !== "true";
    filters.forEach((other) => other.setAttribute("aria-pressed", String(other === filter && on)));
    for (const row of document.querySelectorAll("#claims tbody tr")) {
      row.hidden = on && row.dataset.verdict !== filter.dataset.verdict;
    }
  });
}

const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

let folded = [];
addEventListener("beforeprint", () => {
  // The numbers of a plot stay folded: they are in the rows, too.
  folded = [...document.querySelectorAll("details:not([open])")].filter((one) => !one.closest("figure"));
  folded.forEach((one) => { one.open = true; });
});
addEventListener("afterprint", () => folded.forEach((one) => { one.open = false; }));
