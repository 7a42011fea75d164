const MARKS = {
  n: ["none", "kept, nothing marks it"],
  k: ["keep", "kept by a mark"],
  r: ["recompute", "recomputed"],
  e: ["exact", "exact, whatever the mark"],
  ...data.lossy,
};
const ABSENT = "not needed";
const details = html("div");
const tableHolder = html("div");

/** What the chosen point does with each value of each block. */
function heatmap(point, room) {
  const all = data.rows[point.attention].map((row, i) => ({ ...row, marks: point.marks[i] }));
  const rows = all.filter((row) => row.in_blocks);
  if (!rows.length) return null;
  const label = Math.min(250, Math.max(...rows.map((row) => row.path.length)) * 7 + 10);
  const side = room > 560 ? 70 : 0;
  const cell = Math.max(7, Math.min(34, Math.floor((room - label - side) / Math.max(1, data.blocks))));
  const [height, top] = [18, 24];
  const picture = svg("svg", { width: label + cell * data.blocks + side, height: top + height * rows.length + 2 });
  const every = cell >= 16 ? 1 : cell >= 9 ? 4 : 8;
  for (let block = 0; block < data.blocks; block += every) {
    picture.append(svg("text", { x: label + cell * (block + 0.5), y: 15, "text-anchor": "middle" }, String(block)));
  }
  picture.append(svg("text", { x: 0, y: 15 }, "value, by block"));
  if (side) {
    const x = label + cell * data.blocks + side;
    picture.append(svg("text", { x, y: 15, "text-anchor": "end" }, "bytes each"));
  }
  rows.forEach((row, i) => {
    const y = top + height * i;
    picture.append(svg("text", { class: "mono", x: 0, y: y + 13 }, row.path));
    [...row.marks].forEach((mark, block) => {
      const [name, words] = MARKS[mark] ?? [null, ABSENT];
      const box = svg("rect", {
        x: label + cell * block + 0.5,
        y: y + 0.5,
        width: cell - 1,
        height: height - 1,
        rx: 2,
        fill: name ? `var(--${name})` : "none",
        stroke: name ? "none" : "var(--line)",
      });
      const path = row.path.replace("*", block);
      box.append(svg("title", {}, `${path} (${row.op}): ${words}, ${showBytes(row.bytes)} in full`));
      picture.append(box);
    });
    if (side) {
      const x = label + cell * data.blocks + side;
      picture.append(svg("text", { x, y: y + 13, "text-anchor": "end" }, showBytes(row.bytes)));
    }
  });
  return html("div", { class: "scroll" }, picture);
}

/** The same of what lies outside the blocks. */
function outside(point) {
  const all = data.rows[point.attention].map((row, i) => ({ ...row, mark: point.marks[i] }));
  const rows = all.filter((row) => !row.in_blocks);
  const chip = (row) => {
    const [name, words] = MARKS[row.mark] ?? [null, ABSENT];
    const box = name ? swatch(name) : html("span", { class: "swatch", style: "border: 1px solid var(--line)" });
    return html("span", { title: `${row.op}: ${words}, ${showBytes(row.bytes)}` }, box, html("code", {}, row.path));
  };
  return rows.length ? html("div", { class: "chips" }, "Outside the blocks:", rows.map(chip)) : null;
}

function showChosen() {
  const entries = Object.values(MARKS).map(([name, words]) => html("span", {}, swatch(name), words));
  const empty = html("span", {}, html("span", { class: "swatch", style: "border: 1px solid var(--line)" }), ABSENT);
  const room = details.clientWidth - (window.matchMedia("(max-width: 760px)").matches ? 0 : 322);
  details.replaceChildren(
    html("h2", {}, "Marks under ", html("code", {}, chosen.label)),
    html(
      "p",
      {},
      `${KINDS[chosen.kind]}, ${FORM_NAMES[chosen.attention]}. ` +
        "Choose another point in the picture or in the table.",
    ),
    html(
      "div",
      { class: "split" },
      html("div", {}, html("div", { class: "legend" }, entries, empty), heatmap(chosen, room), outside(chosen)),
      html("dl", { class: "figures" }, figures({ point: chosen }).map(([name, value]) => pair(name, value))),
    ),
  );
  tableHolder.replaceChildren(table());
}

function choose(point) {
  chosen = point;
  document.body.dataset.chosen = point.label;
  render();
  showChosen();
}

const none = points.find((p) => p.kind === "none" && p.attention === FORMS[0]);
const smallest = points.reduce((best, p) => (p.peak_bytes < best.peak_bytes ? p : best), points[0]);
root.append(
  html("h1", {}, `Memory against time: ${model.name}`),
  html(
    "p",
    {},
    `${model.layers} blocks, width ${model.dim}, ${model.batch} × ${model.seq} tokens, ${model.dtype}. ` +
      (measured
        ? `Medians of ${points[0].repeats} rounds on ${data.frontier.device} ` +
          `with ${points[0].threads} threads. Left and low is better.`
        : data.frontier.device === "meta"
          ? "Dry runs: bytes and FLOPs, nothing computed. Left and low is better."
          : "Bytes and FLOPs, no time taken. Left and low is better."),
  ),
  html(
    "div",
    { class: "tiles" },
    none ? tile(showBytes(none.peak_bytes), `peak without marks, ${FORM_NAMES[FORMS[0]]}`) : null,
    tile(showBytes(smallest.peak_bytes), `the smallest peak: ${smallest.label}`),
    tile(showBytes(points[0].param_bytes), "parameters, on top"),
  ),
  legend(),
  chart,
  details,
  html("h2", {}, "All points"),
  tableHolder,
);
document.body.dataset.chosen = chosen.label;
whenResized(() => {
  render();
  showChosen();
});
document.body.dataset.points = points.length + peers.length;
document.body.dataset.ready = "true";
