// SPDX-License-Identifier: Apache-2.0
// Converts a trace to one animated SVG file without scripts.

import { layout, lookOf } from "./board.js";
import { EDITED, MASKED } from "./trace.js";

const WIDTH = 880;
const STEP_S = 0.22, LONGEST_S = 14, HOLD_S = 2.5;

// The text of the file. Viewers without animation show the last step.
export function svgOf(trace, blockLength, ink, title) {
  const isMap = trace.length > 1024;
  const plan = layout(trace.length, blockLength, WIDTH, isMap);
  const pace = Math.min(STEP_S, LONGEST_S / trace.frames.length);
  const seconds = trace.frames.length * pace + HOLD_S;
  const clock = { seconds, at: (index) => ((index + 1) * pace) / seconds };
  const histories = historiesOf(trace, ink);
  const cells = histories.map((history, i) => cellOf(history, plan, i, clock)).join("\n");
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${plan.height}" ` +
    `font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12" role="img">\n` +
    `<title>${escaped(title)}</title>\n` +
    `<rect width="100%" height="100%" fill="${ink.paper}"/>\n${cells}\n</svg>\n`;
}

// The successive looks of every position: [frame, look, text]; frame -1 is the empty canvas.
function historiesOf(trace, ink) {
  const was = trace.at;
  trace.seek(-1);
  const histories = Array.from({ length: trace.length }, (_, i) => [[-1, lookOf(trace, i, ink), ""]]);
  let settling = [];
  for (let k = 0; k < trace.frames.length; k++) {
    trace.seek(k);
    const touched = new Set([...settling, ...trace.frames[k].positions]);
    for (const i of touched) note(histories[i], k, lookOf(trace, i, ink), trace.labelAt(i));
    settling = [...trace.frames[k].fresh];
  }
  trace.seek(was);
  return histories;
}

function note(history, frame, look, text) {
  const [, before, textBefore] = history.at(-1);
  const isSame = before.fill === look.fill && textBefore === text && before.text === look.text &&
    Math.abs(before.alpha - look.alpha) < 0.02;
  if (!isSame) history.push([frame, look, text]);
}

function cellOf(history, plan, i, clock) {
  const [x, y] = plan.place(i).map((v) => Math.round(v * 10) / 10);
  const { cell, isMap } = plan;
  const w = round(cell.width - cell.gap), h = cell.height - cell.gap;
  const last = history.at(-1)[1];
  const fills = animated("fill", history.map(([k, look]) => [k, look.fill]), clock);
  const shades = animated("fill-opacity", history.map(([k, look]) => [k, round(look.alpha)]), clock);
  const rect = `<rect x="${x}" y="${y}" width="${w}" height="${h}" rx="${isMap ? 1.5 : 3}" ` +
    `fill="${last.fill}" fill-opacity="${round(last.alpha)}">${fills}${shades}</rect>`;
  return isMap ? rect : rect + textsOf(history, x + 6, y + h / 2 + 4, w - 10, clock);
}

function textsOf(history, x, y, width, clock) {
  const most = Math.max(1, Math.floor(width / 7.3));
  return history.map(([frame, look, text], k) => {
    if (look.state === MASKED || !text) return "";
    const cut = text.length > most ? `${text.slice(0, most - 1)}…` : text;
    const end = history[k + 1]?.[0];
    const seen = [[-1, frame < 0 ? 1 : 0], [frame, 1], ...(end === undefined ? [] : [[end, 0]])];
    const weight = look.state === EDITED ? ' text-decoration="underline"' : "";
    return `<text x="${x}" y="${y}" fill="${look.text}" opacity="${end === undefined ? 1 : 0}"` +
      `${weight}>${escaped(cut)}${animated("opacity", seen, clock)}</text>`;
  }).join("");
}

// An <animate> that jumps from value to value, or "" if there is only one value.
function animated(name, pairs, clock) {
  const steps = pairs.filter(([, value], k) => k === 0 || value !== pairs[k - 1][1]);
  if (steps.length < 2) return "";
  const times = steps.map(([k]) => (k < 0 ? 0 : round(clock.at(k), 5)));
  return `<animate attributeName="${name}" calcMode="discrete" dur="${round(clock.seconds)}s" ` +
    `repeatCount="indefinite" keyTimes="${times.join(";")}" ` +
    `values="${steps.map(([, value]) => value).join(";")}"/>`;
}

const round = (value, digits = 2) => Number(value.toFixed(digits));

const SIGNS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };

function escaped(text) {
  return text.replace(/[&<>"]/g, (c) => SIGNS[c]).replace(/[\u0000-\u0008\u000b-\u001f]/g, "");
}
