// A table that the reader sorts: a button in each head, by pointer or keys. State: {caption, columns, rows}.
//
// A column is {name, title, number}; a cell is [text, value], sorted by its value.

/** Draw the table, sorted by one column. */
function draw(host, state) {
  host.replaceChildren();
  const table = host.appendChild(document.createElement("table"));
  table.className = "mpkit-sortable";
  table.appendChild(document.createElement("caption")).textContent = state.caption;
  const head = table.appendChild(document.createElement("thead")).insertRow();
  const body = table.appendChild(document.createElement("tbody"));
  state.columns.forEach((column, i) => {
    const cell = head.appendChild(document.createElement("th"));
    cell.scope = "col";
    const button = cell.appendChild(document.createElement("button"));
    button.type = "button";
    button.textContent = column.name;
    button.title = `${column.title}: sort`;
    button.addEventListener("click", () => sort(i));
  });
  let order = { by: -1, falling: false };

  function sort(by) {
    order = { by, falling: order.by === by && !order.falling };
    fill();
  }

  function fill() {
    const rows = [...state.rows];
    if (order.by >= 0) rows.sort((a, b) => compare(a[order.by][1], b[order.by][1], order.falling ? -1 : 1));
    body.replaceChildren();
    for (const row of rows) {
      const line = body.insertRow();
      row.forEach(([text], i) => {
        const cell = line.insertCell();
        cell.textContent = text;
        if (state.columns[i].number) cell.className = "mpkit-number";
      });
    }
    [...head.cells].forEach((cell, i) => {
      const sorted = i === order.by ? (order.falling ? "descending" : "ascending") : "none";
      cell.setAttribute("aria-sort", sorted);
    });
  }

  fill();
}

/** Order values, rising (sign 1) or falling (-1); what is missing comes last either way. */
function compare(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (a < b ? -1 : a > b ? 1 : 0);
}

export default {
  render({ model, el }) {
    const state = () => ({ caption: model.get("caption"), columns: model.get("columns"), rows: model.get("rows") });
    draw(el, state());
    model.on("change:rows", () => draw(el, state()));
  },
};
