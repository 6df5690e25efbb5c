// A click on a column's head sorts the table by it, a second one the other way; the field above keeps rows that hold its words.
document.querySelectorAll("table.sortable").forEach(table => {
  const body = table.tBodies[0], rows = [...body.rows], heads = table.tHead.querySelectorAll("th");
  const key = (row, i) => { const text = row.cells[i].textContent, number = parseFloat(text); return isNaN(number) ? text : number; };
  heads.forEach((head, i) => head.addEventListener("click", () => {
    const order = head.ariaSort === "ascending" ? "descending" : "ascending", sign = order === "ascending" ? 1 : -1;
    heads.forEach(each => { each.ariaSort = each === head ? order : null; });
    rows.sort((a, b) => { const x = key(a, i), y = key(b, i); return sign * (typeof x === typeof y ? (x > y) - (x < y) : typeof x === "number" ? -1 : 1); });
    body.append(...rows);
  }));
  const field = document.createElement("input");
  field.placeholder = "only rows with ...";
  field.addEventListener("input", () => rows.forEach(row => row.hidden = !row.textContent.toLowerCase().includes(field.value.toLowerCase())));
  table.before(field);
});
