// A picture of layers: boxes in columns, and lines from each column to the next, as wide as what they carry.

import { s } from "../ui/lib/dom.js";
import * as format from "../ui/lib/format.js";

const boxHeight = 26, gap = 8, top = 24;

// layers draws columns of {title, boxes: [{text, count, plane}]}, and edges [column, from, to, weight]. The picture is
// decoration: what it shows stands in a table beside it.
export function layers(width, columns, edges) {
  const n = columns.length;
  const boxWidth = Math.max(80, Math.min(320, (width * (n === 2 ? 0.7 : 0.75)) / n));
  const step = n > 1 ? (width - boxWidth) / (n - 1) : 0;
  const tallest = Math.max(1, ...columns.map((c) => c.boxes.length));
  const height = top + tallest * (boxHeight + gap);
  const y = (c, i) => top + ((tallest - columns[c].boxes.length) * (boxHeight + gap)) / 2 + i * (boxHeight + gap);
  const most = Math.max(1, ...edges.map((e) => e[3]));
  const letters = Math.floor((boxWidth - 52) / 6.6);
  return s("svg", { class: "layers", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    edges.map(([c, from, to, weight]) => {
      const x1 = c * step + boxWidth, x2 = (c + 1) * step, y1 = y(c, from) + boxHeight / 2, y2 = y(c + 1, to) + boxHeight / 2, bend = (x2 - x1) / 2;
      return s("path", { d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`, "stroke-width": 1 + (7 * weight) / most });
    }),
    columns.map((column, c) => [
      s("text", { class: "title", x: c * step, y: 14, text: column.title }),
      column.boxes.map((b, i) => s("g", { "data-plane": b.plane },
        s("title", { text: b.text }),
        s("rect", { x: c * step + 0.5, y: y(c, i) + 0.5, width: boxWidth - 1, height: boxHeight - 1, rx: 6 }),
        s("text", { x: c * step + 8, y: y(c, i) + 17, text: b.text.length > letters ? `${b.text.slice(0, Math.max(1, letters - 1))}…` : b.text }),
        s("text", { class: "count", x: c * step + boxWidth - 8, y: y(c, i) + 17, text: b.count === undefined ? "" : format.count(b.count) }))),
    ]));
}
