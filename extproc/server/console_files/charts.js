// Line charts and stacked bars, as SVG.

import { element, svgElement } from "./dom.js";

const HEIGHT = 116;
const MARGIN = { top: 8, right: 8, bottom: 20, left: 56 };

/**
 * Draw a chart of values over the last minutes into a figure.
 *
 * @param figure The figure element; its content is replaced.
 * @param title Heading.
 * @param lines A list of {name, kind, values}; kind is a CSS class, null is a gap.
 * @param ages Seconds ago of each value, oldest first.
 * @param format Turns a value into text.
 * @param spanS Seconds that the axis covers.
 */
export function drawLines(figure, { title, lines, ages, format, spanS }) {
  const width = Math.max(240, figure.clientWidth - 2 * 16);
  const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
  const most = niceMaximum(Math.max(0, ...lines.flatMap((line) => line.values.map(Number))));
  const x = (ageS) => MARGIN.left + inner.width * (1 - Math.min(ageS, spanS) / spanS);
  const y = (value) => MARGIN.top + inner.height * (1 - value / most);

  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const at = y(share * most);
    parts.push(
      svgElement("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }),
      svgElement("text", { class: "tick", x: MARGIN.left - 6, y: at + 4, "text-anchor": "end" }, format(share * most)),
    );
  }
  for (const [share, text, anchor] of [
    [0, `${Math.round(spanS / 60)} min ago`, "start"],
    [1, "now", "end"],
  ]) {
    const at = MARGIN.left + inner.width * share;
    parts.push(svgElement("text", { class: "tick", x: at, y: HEIGHT - 4, "text-anchor": anchor }, text));
  }
  for (const line of lines) {
    parts.push(svgElement("path", { class: `line ${line.kind}`, d: pathOf(line.values, ages, x, y) }));
  }
  const latest = lines.map((line) => `${line.name} ${format(line.values.at(-1))}`);
  figure.replaceChildren(
    element(
      "figcaption",
      {},
      element("h2", {}, title),
      element(
        "ul",
        { class: "legend" },
        lines.map((line) =>
          element("li", {}, element("span", { class: `swatch ${line.kind}` }), `${line.name} `, element("b", {}, format(line.values.at(-1)))),
        ),
      ),
    ),
    svgElement(
      "svg",
      { role: "img", "aria-label": `${title}, now: ${latest.join(", ")}`, viewBox: `0 0 ${width} ${HEIGHT}` },
      parts,
    ),
  );
}

/** The path of a line; gaps interrupt it, and a value between two gaps is a dot. */
function pathOf(values, ages, x, y) {
  let path = "";
  let isDrawing = false;
  values.forEach((value, at) => {
    if (value === null) {
      isDrawing = false;
      return;
    }
    const point = `${x(ages[at]).toFixed(1)} ${y(value).toFixed(1)}`;
    path += isDrawing ? `L${point}` : `M${point}h0.1`;
    isDrawing = true;
  });
  return path;
}

/** The smallest of 1, 2, 5 times a power of ten that is not below a value. */
function niceMaximum(value) {
  if (!(value > 0)) {
    return 1;
  }
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((limit) => limit >= value);
}

/**
 * A bar of stacked parts.
 *
 * @param parts A list of {name, value, kind}; negative values are not drawn.
 * @param most Value at the full width.
 * @param label Text for screen readers.
 */
export function stackedBar(parts, most, label) {
  const rects = [];
  let start = 0;
  for (const { name, value, kind } of parts) {
    const size = most > 0 ? (1000 * Math.max(0, value)) / most : 0;
    if (size > 0) {
      const rect = svgElement("rect", { class: kind, x: start, y: 0, width: size, height: 16 });
      rect.append(svgElement("title", {}, name));
      rects.push(rect);
      start += size;
    }
  }
  return svgElement(
    "svg",
    { class: "stack", role: "img", "aria-label": label, viewBox: "0 0 1000 16", preserveAspectRatio: "none" },
    rects,
  );
}
