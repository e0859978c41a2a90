"use strict";
// Sorts a table by the column whose head is pressed: figures by their value, text by itself, empty entries last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.setAttribute("aria-sort", other === head ? (up ? "ascending" : "descending") : "none");
      const rows = [...table.tBodies[0].rows];
      const value = (row) => row.cells[column].dataset.key;
      const text = (row) => row.cells[column].textContent;
      rows.sort((a, b) => {
        const left = value(a), right = value(b);
        if (left === undefined && right === undefined) {
          const empty = (text(a) === "-") - (text(b) === "-");
          return empty || (up ? 1 : -1) * text(a).localeCompare(text(b), "en", { numeric: true });
        }
        if (left === undefined || right === undefined) return left === undefined ? 1 : -1;
        return (up ? 1 : -1) * (Number(left) - Number(right));
      });
      table.tBodies[0].append(...rows);
    });
  });
}
