"use strict";
// Sort, filter and copy tables, enlarge images. Without it the page says all the same.
const make = (tag, text, more) => Object.assign(document.createElement(tag), { textContent: text }, more);
const number = (cell) => {
  const text = (cell.firstChild ? cell.firstChild.textContent : "").replace("\u2212", "-").replace(/[\s,\u202f]/g, "");
  return text === "" || Number.isNaN(parseFloat(text)) ? null : parseFloat(text);
};
const sort = (table, place, button) => {
  const body = table.tBodies[0], up = button.dataset.way !== "up";
  table.querySelectorAll("button.sort").forEach((other) => delete other.dataset.way);
  button.dataset.way = up ? "up" : "down";
  const cells = (row) => row.children[place];
  const order = (a, b) => {
    const [x, y] = [number(cells(a)), number(cells(b))];
    if (x === null || y === null) return cells(a).textContent.localeCompare(cells(b).textContent);
    return x - y;
  };
  [...body.rows].sort((a, b) => (up ? 1 : -1) * order(a, b)).forEach((row) => body.append(row));
};
const copy = (table, button) => {
  const text = [...table.rows].map((row) => [...row.cells].map((cell) => cell.innerText.trim().replace(/\s+/g, " ")).join("\t"));
  const area = make("textarea", text.join("\n"));
  document.body.append(area);
  area.select();
  button.textContent = document.execCommand("copy") ? "Copied" : "Not copied";
  area.remove();
};
for (const table of document.querySelectorAll("table.stack, .scroll table")) {
  if (!table.tHead || !table.tBodies.length || table.tBodies[0].rows.length < 3) continue;
  [...table.tHead.rows[0].cells].forEach((head, place) => {
    if (head.classList.contains("rails") || !head.textContent.trim()) return;
    const button = make("button", head.textContent, { className: "sort", type: "button", title: "Sort by this column" });
    button.onclick = () => sort(table, place, button);
    head.replaceChildren(button);
  });
  const bar = make("div", "", { className: "tools" }), button = make("button", "Copy", { type: "button", title: "Copy the table" });
  button.onclick = () => copy(table, button);
  if (table.tBodies[0].rows.length > 8) {
    const filter = make("input", "", { type: "search", placeholder: "Filter rows" });
    filter.setAttribute("aria-label", "Filter rows");
    filter.oninput = () => {
      for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase());
    };
    bar.append(filter);
  }
  bar.append(button);
  (table.closest(".scroll") || table).before(bar);
}
const large = make("dialog", "", { className: "zoom" });
large.setAttribute("aria-label", "Image, enlarged");
large.onclick = () => large.close();
document.body.append(large);
document.addEventListener("click", (event) => {
  if (event.target.tagName !== "IMG" || large.contains(event.target)) return;
  const image = make("img", "", { src: event.target.src, alt: event.target.alt });
  large.classList.toggle("pixelated", getComputedStyle(event.target).imageRendering === "pixelated");
  large.replaceChildren(image, make("p", event.target.alt, { className: "small" }));
  large.showModal();
});
const seconds = Number(document.body.dataset.reload);
if (seconds) setInterval(() => document.hidden || large.open || location.reload(), 1000 * seconds);
