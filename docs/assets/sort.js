// A click on a heading sorts its table by that column: figures by size, the rest by name; another click turns it round.
document.addEventListener("click", (event) => {
  const heading = event.target.closest("article th");
  if (!heading) return;
  const body = heading.closest("table").tBodies[0];
  const column = heading.cellIndex;
  const key = (row) => row.cells[column].textContent.trim().replace("−", "-").replaceAll(",", "");
  const scale = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
  const size = (text) => parseFloat(text) * (scale[text.split(" ")[1]] ?? 1);
  const rows = [...body.rows];
  const numeric = rows.every((row) => !key(row) || !isNaN(parseFloat(key(row))));
  const sign = heading.dataset.order === "down" ? 1 : -1;
  heading.dataset.order = sign < 0 ? "down" : "up";
  const compare = (a, b) => (numeric ? (size(key(a)) || 0) - (size(key(b)) || 0) : key(b).localeCompare(key(a)));
  body.append(...rows.sort((a, b) => sign * compare(a, b)));
});
