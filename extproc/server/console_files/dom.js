// Elements of the page. Text from outside becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; strings become text. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svgElement(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Change the text of a node, but only where it differs: readers announce changes. */
export function setText(node, text) {
  if (node.textContent !== text) {
    node.textContent = text;
  }
}

/** Set the classes of a node, but only where they differ. */
export function setClass(node, name) {
  if (node.getAttribute("class") !== name) {
    node.setAttribute("class", name);
  }
}

/** A table with a caption for screen readers; columns are {title, kind}. */
export function table(caption, columns) {
  const heads = columns.map(({ title, kind }) =>
    element("th", { scope: "col", class: kind }, title),
  );
  const body = element("tbody");
  const node = element(
    "table",
    {},
    element("caption", { class: "hidden" }, caption),
    element("thead", {}, element("tr", {}, heads)),
    body,
  );
  return { node, body };
}

/**
 * Rows of a table body that stay while their key does, so that focus and selection stay as well.
 *
 * @param body The tbody.
 * @param items What the rows show, in order.
 * @param key Returns the key of an item.
 * @param create Returns a new row: {node, update}.
 */
export function updateRows(body, items, key, create) {
  const before = body.rowsByKey ?? new Map();
  const after = new Map(items.map((item) => [key(item), before.get(key(item)) ?? create(item)]));
  // First, as those behind them would be moved, and a row that is moved loses the focus.
  for (const [name, row] of before) {
    if (!after.has(name)) {
      row.node.remove();
    }
  }
  let place = body.firstChild;
  for (const item of items) {
    const row = after.get(key(item));
    row.update(item);
    if (row.node === place) {
      place = place.nextSibling;
    } else {
      body.insertBefore(row.node, place);
    }
  }
  body.rowsByKey = after;
}

/** A description list; pairs with an empty value are left out. */
export function descriptions(pairs) {
  return pairs
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
}
