"use strict";
window.onerror = (message, source, line) => {
  document.body.dataset.error = `${message} (line ${line})`;
};

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.getElementById("page");

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element. */
const html = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** An SVG element. */
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** The unit in which so many bytes are a number that people read. */
function unitOf(bytes) {
  let unit = 0;
  while (unit + 1 < UNITS.length && bytes >= 1024 ** (unit + 1)) unit += 1;
  return { name: UNITS[unit], size: 1024 ** unit };
}

function showBytes(bytes) {
  const { name, size } = unitOf(bytes);
  return size === 1 ? `${bytes} B` : `${(bytes / size).toFixed(1)} ${name}`;
}

const showPercent = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(1)} %`);

/** Round numbers between two ends, about so many. */
function ticks(low, high, about) {
  const span = high - low || 1;
  const raw = span / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((k) => k >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i += 1) found.push(i * step);
  return { step, at: found };
}

function tickText(value, step) {
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9) + (String(step).includes("25") ? 1 : 0));
  return value.toFixed(Math.min(digits, 6)).replace(/^-(0(\.0*)?)$/, "$1");
}

/** `*` for each segment of a path that is a number. */
const starred = (path) => path.split(".").map((s) => (/^\d+$/.test(s) ? "*" : s)).join(".");

const swatch = (colour) => html("span", { class: "swatch", style: `background: var(--${colour})` });

const tile = (figure, text) => html("div", { class: "tile" }, html("b", {}, figure), html("span", {}, text));

const pair = (name, value, colour) => [html("dt", {}, colour ? swatch(colour) : null, name), html("dd", {}, value)];

/** Puts a chart's tip beside a point, inside the chart. */
function placeTip(tip, chart, x, y) {
  tip.hidden = false;
  const room = chart.clientWidth;
  const left = x + 16 + tip.offsetWidth <= room ? x + 16 : x - 16 - tip.offsetWidth;
  tip.style.left = `${Math.max(0, Math.min(left, room - tip.offsetWidth))}px`;
  tip.style.top = `${Math.max(0, y - tip.offsetHeight / 2)}px`;
}

/** Draws now and whenever the page's width changes. */
function whenResized(redraw) {
  let width = 0;
  const check = () => {
    if (root.clientWidth !== width) {
      width = root.clientWidth;
      redraw();
    }
  };
  check();
  window.addEventListener("resize", check);
}
