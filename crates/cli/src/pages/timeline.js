const STACK = ["saved", "quantized", "recomputed", "activation", "workspace", "input"];
const APART = ["parameter", "gradient", "optimizer"];
const WORDS = {
  parameter: "parameters",
  gradient: "gradients of parameters",
  optimizer: "optimizer state",
  input: "input",
  activation: "in use right now",
  saved: "saved for backward",
  quantized: "saved in fewer bytes",
  recomputed: "replayed or unpacked",
  workspace: "workspace of an op",
};
const PHASES = { forward: "forward", backward: "backward", replay: "replay for backward" };

// The bytes of each kind after each event, from what each event changed.
const count = data.events.bytes.length;
const series = Object.fromEntries(data.kinds.map((kind) => [kind, new Float64Array(count)]));
const stepBytes = new Float64Array(count);
const momentOf = new Uint32Array(count);
(function decode() {
  const live = { ...data.before };
  let event = 0;
  data.moments.forEach((moment, index) => {
    for (let i = 0; i < moment.events; i += 1, event += 1) {
      const bytes = data.events.bytes[event];
      const [from, to] = [data.kinds[data.events.from[event]], data.kinds[data.events.to[event]]];
      if (from) live[from] -= bytes;
      if (to) live[to] += bytes;
      momentOf[event] = index;
      for (const kind of data.kinds) series[kind][event] = live[kind];
      stepBytes[event] = STACK.reduce((sum, kind) => sum + live[kind], 0);
    }
  });
})();

const peak = data.peak.event;
const turn = momentOf.findIndex((moment) => data.moments[moment].phase !== "forward");
const backwardFrom = turn < 0 ? count : turn;
const highest = (kind) => series[kind].reduce((a, b) => Math.max(a, b), data.before[kind]);
const shown = STACK.filter((kind) => highest(kind) > 0);
const apart = APART.filter((kind) => highest(kind) > 0);
const doing = (moment) => `${PHASES[moment.phase]} of ${moment.path ?? "an unnamed op"}`;

/** The part of the model that an event belongs to: a block, or what comes before and after the blocks. */
const parts = (function () {
  const found = [];
  let name = null;
  for (let event = 0; event < count; event += 1) {
    const moment = data.moments[momentOf[event]];
    // A replay belongs to the gradient that it is for.
    if (moment.phase !== "replay" && moment.path) {
      const [, block] = /^transformer\.h\.(\d+)(?:\.|$)/.exec(moment.path) ?? [];
      const outside = moment.path.replace(/^transformer\./, "").split(".")[0];
      const own = block ?? (["wte", "wpe"].includes(outside) ? "embed" : outside);
      const back = event >= backwardFrom;
      if (own !== name || found.at(-1).back !== back) {
        name = own;
        found.push({ name, block: block !== undefined, from: event, to: event, back });
      }
    }
    if (found.length) found.at(-1).to = event + 1;
  }
  return found;
})();

const chart = html("div", { class: "chart", tabindex: "0", role: "img", "aria-label": "Memory after each event" });
const tip = html("div", { class: "tip", hidden: "" });
let scale = null;
let at = peak ?? 0;

/** For each column of pixels the event at which most step bytes are live. */
function columns(width) {
  const found = [];
  const columns = Math.max(1, Math.min(count, Math.floor(width)));
  for (let column = 0; column < columns; column += 1) {
    const [from, to] = [Math.floor((column * count) / columns), Math.floor(((column + 1) * count) / columns)];
    let best = from;
    for (let event = from; event < to; event += 1) if (stepBytes[event] > stepBytes[best]) best = event;
    found.push({ from, to, event: best });
  }
  return found;
}

/** The kinds on top of each other, as areas. */
function areas(kinds, cells, x, y) {
  const base = new Float64Array(cells.length);
  return kinds.map((kind) => {
    let [up, down] = ["", ""];
    cells.forEach((cell, i) => {
      const top = base[i] + series[kind][cell.event];
      up += `${i ? "L" : "M"}${x(cell.from).toFixed(1)} ${y(top).toFixed(1)}H${x(cell.to).toFixed(1)}`;
      down = `L${x(cell.to).toFixed(1)} ${y(base[i]).toFixed(1)}H${x(cell.from).toFixed(1)}${down}`;
      base[i] = top;
    });
    return svg("path", { d: `${up}${down}Z`, fill: `var(--${kind})`, "shape-rendering": "crispEdges" });
  });
}

function axisOfBytes(top, y, left, right, about) {
  const unit = unitOf(top);
  const { step, at } = ticks(0, top / unit.size, about);
  const lines = at.flatMap((value) => {
    const height = Math.round(y(value * unit.size)) + 0.5;
    return [
      svg("line", { class: value ? "grid" : "axis", x1: left, x2: right, y1: height, y2: height }),
      svg("text", { x: left - 8, y: height + 4, "text-anchor": "end" }, tickText(value, step)),
    ];
  });
  return { lines, unit: unit.name };
}

function render() {
  const width = chart.clientWidth;
  const narrow = width < 560;
  const [left, right, top] = [narrow ? 40 : 48, width - 2, 62];
  const bottom = top + (narrow ? 260 : 330);
  const stripTop = bottom + 62;
  const stripBottom = stripTop + 70;
  const most = stepBytes.reduce((a, b) => Math.max(a, b), 1) * 1.04;
  const x = (event) => left + ((right - left) * event) / count;
  const y = (bytes) => bottom - ((bottom - top) * bytes) / most;
  const cells = columns(right - left);
  const main = axisOfBytes(most, y, left, right, 5);
  const picture = svg("svg", { height: apart.length ? stripBottom + 8 : bottom + 40 });
  picture.style.height = `${apart.length ? stripBottom + 8 : bottom + 40}px`;
  picture.append(svg("text", { x: 0, y: 12 }, `${main.unit} live, parameters and their gradients apart`));

  for (const part of parts.filter((p, i) => i % 2 === 1)) {
    const [from, to] = [x(part.from), x(part.to)];
    picture.append(svg("rect", { x: from, y: top, width: to - from, height: bottom - top, fill: "var(--panel)" }));
  }
  picture.append(...main.lines, ...areas(shown, cells, x, y));

  // Every block's number, or every other one's, ..., as there is room in forward, where they are narrower.
  const sizes = parts.filter((p) => p.block).map((p) => x(p.to) - x(p.from));
  const room = Math.min(...sizes, right);
  const every = [1, 2, 4, 8, 16, 32, 64].find((n) => n * room > 20) ?? 128;
  const half = (part) => part.name.length * 3.4 + 3;
  let free = -Infinity;
  for (const part of parts) {
    const middle = (x(part.from) + x(part.to)) / 2;
    const fits = part.block ? Number(part.name) % every === 0 : half(part) < (x(part.to) - x(part.from)) / 2 + 6;
    if (fits && middle - half(part) >= Math.max(free, left - 8) && middle + half(part) <= right + 4) {
      picture.append(svg("text", { x: middle, y: bottom + 16, "text-anchor": "middle" }, part.name));
      free = middle + half(part);
    }
  }
  const divide = Math.round(x(backwardFrom)) + 0.5;
  picture.append(svg("line", { x1: divide, x2: divide, y1: top - 16, y2: bottom + 36, stroke: "var(--soft)" }));
  const phase = (from, to, name) =>
    svg("text", { class: "strong", x: (from + to) / 2, y: bottom + 35, "text-anchor": "middle" }, name);
  const blocks = narrow ? "" : " (numbers are blocks)";
  picture.append(phase(left, divide, `forward${blocks}`), phase(divide, right, "backward"));

  if (peak !== null) {
    const [px, py] = [(x(peak) + x(peak + 1)) / 2, y(stepBytes[peak])];
    const text = `peak ${showBytes(data.peak_bytes)}${narrow ? "" : `, ${doing(data.peak)}`}`;
    const wide = text.length * 3.6;
    const tx = Math.max(left + wide, Math.min(px, right - wide));
    picture.append(
      svg("line", { x1: px, x2: px, y1: py - 4, y2: top - 14, stroke: "var(--ink)", "stroke-dasharray": "2 3" }),
      svg("circle", { cx: px, cy: py, r: 4.5, fill: "var(--paper)", stroke: "var(--ink)", "stroke-width": 2 }),
      svg("text", { class: "strong", x: tx, y: top - 22, "text-anchor": "middle" }, text),
    );
  }

  if (apart.length) {
    const sum = Math.max(...cells.map((c) => apart.reduce((s, kind) => s + series[kind][c.event], 0))) * 1.04;
    const stripY = (bytes) => stripBottom - ((stripBottom - stripTop) * bytes) / sum;
    const strip = axisOfBytes(sum, stripY, left, right, 2);
    picture.append(svg("text", { x: 0, y: stripTop - 8 }, `${strip.unit}, parameters and their gradients`));
    picture.append(...strip.lines, ...areas(apart, cells, x, stripY));
  }
  const cross = svg("line", { stroke: "var(--ink)", y1: top, y2: apart.length ? stripBottom : bottom, opacity: 0 });
  picture.append(cross);
  chart.replaceChildren(picture, tip);
  scale = { left, right, x, y, cross, top };
}

function show(event, near) {
  at = Math.max(0, Math.min(count - 1, event));
  const moment = data.moments[momentOf[at]];
  const middle = (scale.x(at) + scale.x(at + 1)) / 2;
  for (const name of ["x1", "x2"]) scale.cross.setAttribute(name, middle);
  scale.cross.setAttribute("opacity", 0.6);
  const rows = [...shown, ...apart].filter((kind) => series[kind][at] > 0);
  tip.replaceChildren(
    html("div", { class: "path" }, moment.path ?? "an unnamed op"),
    html("div", {}, `${PHASES[moment.phase]}${moment.op ? `, ${moment.op}` : ""}`),
    html(
      "dl",
      {},
      pair("step", showBytes(stepBytes[at])),
      rows.map((k) => pair(WORDS[k], showBytes(series[k][at]), k)),
    ),
  );
  placeTip(tip, chart, middle, near ?? scale.y(stepBytes[at]));
}

function hide() {
  tip.hidden = true;
  scale.cross.setAttribute("opacity", 0);
}

const follow = (pointer) => {
  const box = chart.getBoundingClientRect();
  const share = (pointer.clientX - box.left - scale.left) / (scale.right - scale.left);
  if (share < 0 || share > 1) hide();
  else show(Math.floor(share * count), pointer.clientY - box.top);
};
chart.addEventListener("pointermove", follow);
chart.addEventListener("pointerdown", follow);
chart.addEventListener("pointerleave", hide);
chart.addEventListener("blur", hide);
chart.addEventListener("keydown", (key) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[key.key];
  if (!step) return;
  key.preventDefault();
  // To the neighbouring op.
  let event = at;
  while (event + step >= 0 && event + step < count && momentOf[event + step] === momentOf[at]) event += step;
  show(event + step);
});

/** What is live at the peak: a row for each path, the blocks' together. */
function contents() {
  const groups = new Map();
  for (const item of data.contents) {
    const name = starred(item.path ?? "–");
    const key = `${name} ${item.what}`;
    if (!groups.has(key)) groups.set(key, { name, what: item.what, kind: item.kind, bytes: 0, items: [] });
    const group = groups.get(key);
    group.bytes += item.bytes;
    group.items.push(item);
  }
  const rows = [...groups.values()].sort((a, b) => b.bytes - a.bytes);
  const largest = rows[0]?.bytes ?? 1;
  const body = html("tbody");
  for (const group of rows) {
    const several = group.items.length > 1;
    const own = several ? [] : [group.items[0]];
    const name = several ? group.name : (own[0].path ?? "–");
    const parts = group.items.map((item) =>
      html(
        "tr",
        { class: "part", hidden: "" },
        html("td", { class: "path" }, item.path ?? "–"),
        html("td", {}, ""),
        html("td", { class: "number" }, showBytes(item.bytes)),
        html("td", { class: "number wide" }, ""),
        html("td", { class: "wide" }, ""),
      ),
    );
    const sign = html("span", {}, "▸ ");
    const toggle = (event) => {
      const open = parts[0].hidden;
      parts.forEach((part) => (part.hidden = !open));
      sign.textContent = open ? "▾ " : "▸ ";
      event.currentTarget.setAttribute("aria-expanded", open);
    };
    const cell = several
      ? html(
          "button",
          { class: "plain path", "aria-expanded": "false", onclick: toggle },
          sign,
          `${name} ×${parts.length}`,
        )
      : html("span", { class: "path" }, name);
    const bar = `width: ${(130 * group.bytes) / largest}px; background: var(--${group.kind})`;
    body.append(
      html(
        "tr",
        {},
        html("td", {}, cell),
        html("td", {}, group.what),
        html("td", { class: "number" }, showBytes(group.bytes)),
        html("td", { class: "number wide" }, showPercent((100 * group.bytes) / data.peak_bytes)),
        html("td", { class: "wide" }, html("span", { class: "bar", style: bar })),
      ),
      ...(several ? parts : []),
    );
  }
  const head = [["path"], ["what it is"], ["bytes", "number"], ["of the peak", "number wide"], ["", "wide"]];
  const cells = head.map(([text, style]) => html("th", { class: style }, text));
  return html("div", { class: "scroll" }, html("table", {}, html("thead", {}, html("tr", {}, cells)), body));
}

const end = (kind) => (count ? series[kind][count - 1] : data.before[kind]);
root.append(
  html("h1", {}, `Memory over one step: ${data.model.name} under ${data.policy}`),
  html(
    "p",
    {},
    `${data.attention === "flash" ? "Tiled" : "Explicit"} attention, ${data.model.layers} blocks, ` +
      `width ${data.model.dim}, ${data.model.batch} × ${data.model.seq} tokens, ${data.model.dtype}. ` +
      "A dry run: no numbers computed, every byte counted.",
  ),
  html(
    "div",
    { class: "tiles" },
    tile(showBytes(data.peak_bytes), "peak of the step"),
    tile(showBytes(data.saved_bytes), "saved when forward ends"),
    tile(showBytes(data.before.parameter), "parameters"),
    tile(showBytes(end("gradient")), "their gradients at the end"),
  ),
  html("div", { class: "legend" }, [...shown, ...apart].map((kind) => html("span", {}, swatch(kind), WORDS[kind]))),
  chart,
  html(
    "p",
    {},
    "From left to right: each time memory is taken, given back or counted as something else. " +
      "Point at it for details; the arrow keys go from op to op.",
  ),
  html("h2", {}, "What is live at the peak"),
  html(
    "p",
    {},
    peak === null
      ? "What was there before the step is the most."
      : `In ${doing(data.peak)}: what the step holds at that moment, the largest first.`,
  ),
  contents(),
);
whenResized(render);
document.body.dataset.points = count;
document.body.dataset.ready = "true";
