const model = data.frontier.model;
const points = data.frontier.points.map((point, index) => ({ ...point, ...data.extras[index], index }));
const peers = data.peers;
const FORMS = ["flash", "explicit"].filter((form) => points.some((p) => p.attention === form));
const FORM_NAMES = { flash: "tiled attention", explicit: "explicit attention" };
const KINDS = { none: "no marks", preset: "preset", budget: "budget", rules: "file of rules", marks: "own marks" };
const measured = points.some((p) => p.overhead_percent !== null);
// A GPU's CPU time is only that of launching; its overheads are of time.
const clock = points.some((p) => p.device.startsWith("cuda")) ? "time" : "CPU time";
const hiddenForms = new Set();
let chosen = points.find((p) => p.policy === "selective") ?? points.find((p) => p.kind !== "none") ?? points[0];

const showError = (error) => (error === null ? "not computed" : error === 0 ? "0" : error.toExponential(1));

/** The radius of the ring around a point that stores values lossily: it grows with the gradient error's magnitude. */
function ringOf(error) {
  if (!error) return 9;
  return Math.max(8, Math.min(22, 8 + 3.5 * (Math.log10(error) + 4.5)));
}

/** Of one form of attention, the points of which no other is better in both: the curve. */
function front(form) {
  const own = points.filter((p) => p.attention === form);
  const beaten = (p) =>
    own.some(
      (o) =>
        o.peak_bytes <= p.peak_bytes &&
        o.overhead <= p.overhead &&
        (o.peak_bytes < p.peak_bytes || o.overhead < p.overhead),
    );
  return own.filter((p) => !beaten(p)).sort((a, b) => a.peak_bytes - b.peak_bytes);
}
const fronts = Object.fromEntries(FORMS.map((form) => [form, front(form)]));
const isOnFront = (point) => fronts[point.attention].includes(point);

/** A point's mark: the shape is its kind. */
function shape(kind, x, y, r, attributes) {
  const polygon = (corners) => {
    const points = corners.map(([dx, dy]) => `${x + dx * r},${y + dy * r}`).join(" ");
    return svg("polygon", { points, ...attributes });
  };
  switch (kind) {
    case "none":
      return svg("rect", { x: x - r * 0.9, y: y - r * 0.9, width: r * 1.8, height: r * 1.8, ...attributes });
    case "budget":
      return polygon([[0, -1.2], [1.1, 0.8], [-1.1, 0.8]]);
    case "rules":
    case "marks":
      return polygon([[0, -1.25], [1.25, 0], [0, 1.25], [-1.25, 0]]);
    case "peer":
      return svg("path", {
        d: `M${x - r} ${y - r}L${x + r} ${y + r}M${x - r} ${y + r}L${x + r} ${y - r}`,
        ...attributes,
      });
    default:
      return svg("circle", { cx: x, cy: y, r, ...attributes });
  }
}

const overlap = (a, b) =>
  Math.max(0, Math.min(a.right, b.right) - Math.max(a.left, b.left)) *
  Math.max(0, Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top));

/** A free place for a label beside its point, or none. */
function placeFor(x, y, width, obstacles, frame) {
  for (let radius = 8; radius < 90; radius += 9) {
    for (let i = 0; i < 24; i += 1) {
      const angle = ((i % 2 ? 1 : -1) * Math.ceil(i / 2) * Math.PI) / 12;
      const [dx, dy] = [Math.cos(angle), Math.sin(angle)];
      const [left, top] = [x + dx * radius + ((dx - 1) / 2) * width, y + dy * radius + ((dy - 1) / 2) * 14];
      const place = { left, top, right: left + width, bottom: top + 14 };
      const inside =
        place.left >= frame.left &&
        place.right <= frame.right &&
        place.top >= frame.top &&
        place.bottom <= frame.bottom;
      if (inside && !obstacles.some((o) => overlap(o, place) > 0)) return place;
    }
  }
  return null;
}

const chart = html("div", {
  class: "chart",
  role: "img",
  "aria-label": "Peak memory against overhead; the table below has the same points",
});
const tip = html("div", { class: "tip", hidden: "" });
let spots = [];

function render() {
  const width = chart.clientWidth;
  const narrow = width < 560;
  const height = narrow ? 380 : 520;
  const frame = { left: narrow ? 38 : 48, right: width - 6, top: 26, bottom: height - 46 };
  const seen = points.filter((p) => !hiddenForms.has(p.attention));
  const all = [...points, ...peers];
  const unit = unitOf(Math.max(...all.map((p) => p.peak_bytes)));
  const most = (Math.max(...all.map((p) => p.peak_bytes)) / unit.size) * 1.06;
  const own = points.flatMap((p) => [p.overhead, p.predicted_overhead_percent]);
  const overheads = [0, 4, ...own, ...peers.map((p) => p.overhead_percent)];
  const [least, top] = [Math.min(...overheads), Math.max(...overheads)];
  const margin = 0.09 * (top - least);
  const [low, high] = [least - margin, top + margin];
  const x = (bytes) => frame.left + ((frame.right - frame.left) * bytes) / unit.size / most;
  const y = (percent) => frame.bottom - ((frame.bottom - frame.top) * (percent - low)) / (high - low);

  const picture = svg("svg", { height });
  picture.style.height = `${height}px`;
  const across = ticks(0, most, narrow ? 4 : 8);
  for (const value of across.at) {
    const at = Math.round(x(value * unit.size)) + 0.5;
    picture.append(
      svg("line", { class: "grid", x1: at, x2: at, y1: frame.top, y2: frame.bottom }),
      svg("text", { x: at, y: frame.bottom + 18, "text-anchor": "middle" }, tickText(value, across.step)),
    );
  }
  const up = ticks(low, high, 7);
  for (const value of up.at) {
    const at = Math.round(y(value)) + 0.5;
    const zero = Math.abs(value) < 1e-9;
    picture.append(
      svg("line", { class: zero ? "axis" : "grid", x1: frame.left, x2: frame.right, y1: at, y2: at }),
      svg("text", { x: frame.left - 8, y: at + 4, "text-anchor": "end" }, tickText(value, up.step)),
    );
  }
  const of = measured ? ` of ${clock}` : " of FLOPs (dry run)";
  const apart = narrow ? "" : " (parameters and their gradients apart)";
  picture.append(
    svg("text", { x: 0, y: 12 }, narrow ? "overhead, %" : `overhead over none of the same attention, %${of}`),
    svg(
      "text",
      { x: frame.right, y: height - 6, "text-anchor": "end" },
      `peak of the step, ${unit.name}${apart}`,
    ),
  );

  for (const form of FORMS.filter((f) => !hiddenForms.has(f))) {
    const line = fronts[form].map((p) => `${x(p.peak_bytes).toFixed(1)},${y(p.overhead).toFixed(1)}`).join(" ");
    const style = { fill: "none", stroke: `var(--${form})`, "stroke-width": 1.5, opacity: 0.55 };
    picture.append(svg("polyline", { points: line, ...style }));
  }
  spots = [];
  const obstacles = [];
  const around = (px, py, r) => ({ left: px - r, right: px + r, top: py - r, bottom: py + r });
  for (const point of seen) {
    const colour = `var(--${point.attention})`;
    const [px, py, predicted] = [x(point.peak_bytes), y(point.overhead), y(point.predicted_overhead_percent)];
    if (point.overhead_percent !== null) {
      const dotted = { stroke: colour, "stroke-width": 1, "stroke-dasharray": "1 3", opacity: 0.8 };
      const hollow = { fill: "var(--paper)", stroke: colour, "stroke-width": 1.2 };
      picture.append(svg("line", { x1: px, x2: px, y1: py, y2: predicted, ...dotted }));
      picture.append(shape(point.kind, px, predicted, 3.4, hollow));
      obstacles.push(around(px, predicted, 4));
    }
    if (point.lossy) {
      const ring = { fill: "none", stroke: colour, "stroke-width": 1.3, opacity: 0.75 };
      if (point.gradient_error === null) ring["stroke-dasharray"] = "2 3";
      picture.append(svg("circle", { cx: px, cy: py, r: ringOf(point.gradient_error), ...ring }));
    }
    spots.push({ point, x: px, y: py });
    obstacles.push(around(px, py, 6));
  }
  for (const { point, x: px, y: py } of spots) {
    const colour = `var(--${point.attention})`;
    const fill = point.overhead_percent === null ? "var(--paper)" : colour;
    if (point === chosen) {
      const ring = { fill: "none", stroke: "var(--ink)", "stroke-width": 2 };
      picture.append(svg("circle", { cx: px, cy: py, r: 11, ...ring }));
    }
    picture.append(shape(point.kind, px, py, 5, { fill, stroke: colour, "stroke-width": 1.6 }));
  }
  for (const peer of peers) {
    const [px, py] = [x(peer.peak_bytes), y(peer.overhead_percent)];
    picture.append(shape("peer", px, py, 4.5, { fill: "none", stroke: "var(--peer)", "stroke-width": 2 }));
    spots.push({ peer, x: px, y: py });
    obstacles.push(around(px, py, 6));
  }

  // Labels: the curve's and the chosen one first; where there is no room there is none, and the tip says the name.
  const rank = ({ point }) => (!point ? 1 : point === chosen ? 0 : isOnFront(point) ? 1 : 2);
  const named = [...spots].sort((a, b) => rank(a) - rank(b)).filter((spot) => !narrow || rank(spot) < 2);
  for (const { point, peer, x: px, y: py } of named) {
    const text = point ? point.label : `${peer.engine} ${peer.label}`;
    if (text.length > 34) continue;
    const place = placeFor(px, py, (point === chosen ? 7 : 6.1) * text.length + 8, obstacles, frame);
    if (!place) continue;
    obstacles.push(place);
    const end = [Math.max(place.left, Math.min(px, place.right)), Math.max(place.top, Math.min(py, place.bottom))];
    const colour = point ? `var(--${point.attention})` : "var(--peer)";
    if (Math.hypot(end[0] - px, end[1] - py) > 15) {
      picture.append(svg("line", { x1: px, y1: py, x2: end[0], y2: end[1], stroke: colour, opacity: 0.45 }));
    }
    const style = `fill: ${colour}${point === chosen ? "; font-weight: 600" : ""}`;
    picture.append(svg("text", { x: place.left + 2, y: place.top + 11, style }, text));
  }
  chart.replaceChildren(picture, tip);
}

/** A point's or a peer's figures, as names and values. */
function figures({ point, peer }) {
  if (peer) {
    return [
      ["peak of the step", showBytes(peer.peak_bytes)],
      peer.saved_bytes === null ? null : ["saved when forward ends", showBytes(peer.saved_bytes)],
      ["overhead", showPercent(peer.overhead_percent)],
    ].filter(Boolean);
  }
  const time = (ms) => (ms === null ? null : `${ms.toFixed(1)} ms`);
  return [
    ["peak of the step", showBytes(point.peak_bytes)],
    ["saved when forward ends", showBytes(point.saved_bytes)],
    [`overhead, ${clock}`, point.overhead_percent === null ? null : showPercent(point.overhead_percent)],
    ["overhead, wall time", point.overhead_wall_percent === null ? null : showPercent(point.overhead_wall_percent)],
    ["overhead, FLOPs (dry run)", showPercent(point.predicted_overhead_percent)],
    ["CPU time of the step", time(point.cpu_ms)],
    ["of it replays", time(point.recompute_ms)],
    ["of it packing", time(point.quantize_ms)],
    ["gradient error", point.lossy ? showError(point.gradient_error) : "0, exact"],
    [
      "of full's savings",
      point.share_of_full_savings_percent === null ? null : `${point.share_of_full_savings_percent.toFixed(0)} %`,
    ],
    ["budget", point.budget_bytes === null ? null : showBytes(point.budget_bytes)],
    ["loss after training", point.loss_after === null ? null : point.loss_after.toFixed(4)],
  ].filter(([, value]) => value !== null);
}

function nearest(pointer) {
  const box = chart.getBoundingClientRect();
  const [px, py] = [pointer.clientX - box.left, pointer.clientY - box.top];
  const far = (spot) => Math.hypot(spot.x - px, spot.y - py);
  const spot = spots.reduce((best, s) => (!best || far(s) < far(best) ? s : best), null);
  return spot && far(spot) < 26 ? spot : null;
}

function pointAt(pointer) {
  const spot = nearest(pointer);
  chart.style.cursor = spot?.point ? "pointer" : "default";
  if (!spot) {
    tip.hidden = true;
    return;
  }
  const { point, peer } = spot;
  tip.replaceChildren(
    html("div", { class: "path" }, point ? point.label : `${peer.engine}: ${peer.label}`),
    html("div", {}, point ? `${KINDS[point.kind]}, ${FORM_NAMES[point.attention]}` : "another engine"),
    html("dl", {}, figures(spot).map(([name, value]) => pair(name, value))),
  );
  placeTip(tip, chart, spot.x, spot.y);
}
chart.addEventListener("pointermove", pointAt);
chart.addEventListener("pointerleave", () => (tip.hidden = true));
chart.addEventListener("click", (click) => {
  const spot = nearest(click);
  if (spot?.point) choose(spot.point);
});

function legend() {
  const sample = (kind, attributes, r = 5) => {
    const size = Math.max(16, 2 * r + 4);
    return svg("svg", { width: size, height: size }, shape(kind, size / 2, size / 2, r, attributes));
  };
  const ink = "var(--soft)";
  const entries = FORMS.map((form) => {
    const toggle = (change) => {
      if (change.target.checked) hiddenForms.delete(form);
      else hiddenForms.add(form);
      render();
    };
    const box = FORMS.length > 1 ? html("input", { type: "checkbox", checked: "", onchange: toggle }) : null;
    return html("label", {}, box, swatch(form), FORM_NAMES[form]);
  });
  const line = svg("line", { x1: 0, x2: 20, y1: 4, y2: 4, stroke: ink, "stroke-width": 1.5 });
  const best = svg("svg", { width: 20, height: 8 }, line);
  entries.push(html("span", {}, best, "best: none is better in both"));
  const kinds = Object.keys(KINDS).filter((kind) => points.some((p) => p.kind === kind));
  const style = { fill: measured ? ink : "none", stroke: ink, "stroke-width": 1.3 };
  entries.push(...kinds.map((kind) => html("span", {}, sample(kind, style, 4.5), KINDS[kind])));
  if (measured) entries.push(html("span", {}, sample("preset", { fill: ink, stroke: ink }, 4.5), `measured, ${clock}`));
  const hollow = sample("preset", { ...style, fill: "var(--paper)" }, measured ? 3.4 : 4.5);
  entries.push(html("span", {}, hollow, "predicted, FLOPs"));
  const errors = points.filter((p) => p.lossy && p.gradient_error).map((p) => p.gradient_error);
  const ring = { fill: "none", stroke: ink, "stroke-width": 1.3 };
  if (errors.length) {
    const [low, high] = [Math.floor(Math.log10(Math.min(...errors))), Math.ceil(Math.log10(Math.max(...errors)))];
    entries.push(html("span", {}, "ring: lossy, by its gradient error"));
    for (let power = low; power <= high; power += 1) {
      entries.push(html("span", {}, sample("preset", ring, ringOf(10 ** power)), `1e${power}`));
    }
  } else if (points.some((p) => p.lossy)) {
    const dashed = sample("preset", { ...ring, "stroke-dasharray": "2 3" }, 9);
    entries.push(html("span", {}, dashed, "lossy, its gradient error not computed"));
  }
  if (peers.length) {
    const cross = sample("peer", { stroke: "var(--peer)", "stroke-width": 2 }, 4.5);
    entries.push(html("span", {}, cross, "another engine"));
  }
  return html("div", { class: "legend" }, entries);
}

/** Every point as a row; its name chooses it. */
function table() {
  const order = [...points].sort(
    (a, b) => FORMS.indexOf(a.attention) - FORMS.indexOf(b.attention) || b.peak_bytes - a.peak_bytes,
  );
  const number = (text, wide) => html("td", { class: wide ? "number wide" : "number" }, text);
  const rows = order.map((p) =>
    html(
      "tr",
      { class: p === chosen ? "chosen" : null },
      html("td", {}, html("button", { class: "plain path", onclick: () => choose(p) }, p.label)),
      html("td", { class: "wide" }, FORM_NAMES[p.attention].split(" ")[0]),
      number(showBytes(p.peak_bytes)),
      number(showBytes(p.saved_bytes), true),
      measured ? number(showPercent(p.overhead_percent)) : null,
      number(showPercent(p.predicted_overhead_percent), measured),
      number(p.lossy ? showError(p.gradient_error) : "0", true),
      html("td", { class: "wide" }, isOnFront(p) ? "best" : ""),
    ),
  );
  const others = peers.map((p) =>
    html(
      "tr",
      {},
      html("td", { class: "path" }, `${p.engine} ${p.label}`),
      html("td", { class: "wide" }, ""),
      number(showBytes(p.peak_bytes)),
      number(p.saved_bytes === null ? "–" : showBytes(p.saved_bytes), true),
      number(showPercent(p.overhead_percent)),
      measured ? number("–", true) : null,
      number("–", true),
      html("td", { class: "wide" }, ""),
    ),
  );
  const head = [
    ["policy"],
    ["attention", "wide"],
    ["peak", "number"],
    ["saved", "number wide"],
    measured ? [clock, "number"] : null,
    ["FLOPs", measured ? "number wide" : "number"],
    ["gradient error", "number wide"],
    ["", "wide"],
  ].filter(Boolean);
  const cells = head.map(([text, style]) => html("th", { class: style }, text));
  const body = html("tbody", {}, rows, others);
  return html("div", { class: "scroll" }, html("table", {}, html("thead", {}, html("tr", {}, cells)), body));
}
