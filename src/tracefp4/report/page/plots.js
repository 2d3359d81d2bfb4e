// Hover, arrow keys and the legend's switches. Without this script every plot is there all the same.
"use strict";
document.documentElement.classList.add("js");

for (const box of document.querySelectorAll("[data-toggle]")) {
  box.addEventListener("change", () => {
    for (const part of document.querySelectorAll(`svg.plot [data-group="${box.dataset.toggle}"]`)) {
      part.classList.toggle("off", !box.checked);
    }
  });
}

const numbers = (text) => text.split(" ").map(Number);
const short = (value) => {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(3)));
};

function pointsOf(path) {
  return path.getAttribute("d").slice(1).split(/[ML]/).map(numbers);
}

function hover(svg) {
  const [left, top, right, bottom] = numbers(svg.dataset.box);
  const [x0, x1] = numbers(svg.dataset.x);
  const [y0, y1] = numbers(svg.dataset.y);
  const log = svg.dataset.log === "1";
  const toX = (x) => Math.round(x0 + ((x - left) / (right - left)) * (x1 - x0));
  const toY = (y) => {
    const share = (bottom - y) / (bottom - top);
    return log ? y0 * Math.pow(y1 / y0, share) : y0 + share * (y1 - y0);
  };
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  svg.after(tip);
  const rule = document.createElementNS("http://www.w3.org/2000/svg", "path");
  rule.setAttribute("class", "rule");
  svg.append(rule);
  let lines = null;
  let stops = [];
  let at = -1;

  function show(index) {
    at = index;
    const x = stops[at];
    rule.setAttribute("d", `M${x} ${top}V${bottom}`);
    const rows = [`${svg.dataset.name} ${toX(x)}`];
    for (const line of lines) {
      if (line.path.closest(".off")) continue;
      const point = line.points.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best));
      if (Math.abs(point[0] - x) <= 2) rows.push(`${line.path.dataset.label}: ${short(toY(point[1]))}`);
    }
    tip.replaceChildren(...rows.map((text) => Object.assign(document.createElement("div"), { textContent: text })));
    tip.hidden = false;
    const area = svg.getBoundingClientRect();
    const around = svg.parentElement.getBoundingClientRect();
    const left = (x * area.width) / svg.viewBox.baseVal.width - tip.offsetWidth / 2;
    tip.style.left = `${Math.max(0, Math.min(around.width - tip.offsetWidth, left))}px`;
    tip.style.top = `${area.bottom - around.top}px`; // below, where it hides no curve
  }
  function hide() {
    tip.hidden = true;
    rule.removeAttribute("d");
  }
  function load() {
    if (lines) return;
    lines = [...svg.querySelectorAll("path.line")].map((path) => ({ path, points: pointsOf(path) }));
    stops = [...new Set(lines.flatMap((line) => line.points.map((p) => p[0])))].sort((a, b) => a - b);
  }
  svg.addEventListener("pointermove", (event) => {
    load();
    const area = svg.getBoundingClientRect();
    const x = ((event.clientX - area.left) / area.width) * svg.viewBox.baseVal.width;
    let best = 0;
    for (let i = 1; i < stops.length; i++) if (Math.abs(stops[i] - x) < Math.abs(stops[best] - x)) best = i;
    if (stops.length) show(best);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!move) return;
    event.preventDefault();
    load();
    if (stops.length) show(at < 0 ? 0 : Math.max(0, Math.min(stops.length - 1, at + move)));
  });
  svg.tabIndex = 0;
}
document.querySelectorAll("svg.plot").forEach(hover);
