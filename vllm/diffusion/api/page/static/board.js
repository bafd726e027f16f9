// SPDX-License-Identifier: Apache-2.0
// Draws a trace on a <canvas> with the size of the visible part; only visible rows are drawn.

import { ABSENT, COMMITTED, EDITED, MASKED, PROPOSED, UNUSED } from "./trace.js";

const SIZES = {
  text: { width: 56, height: 26, gap: 2, between: 12 },
  map: { width: 11, height: 11, gap: 2, between: 6 },
};
const LARGE = 1536; // tokens; longer canvases are first shown as a map
const PADDING = 20;

// Compute the columns and the place of each position. If possible, a row contains whole blocks, or a
// block whole rows.
export function layout(length, blockLength, width, isMap) {
  const size = SIZES[isMap ? "map" : "text"];
  const room = Math.max(1, Math.floor((width - 2 * PADDING) / size.width));
  const block = Math.min(blockLength || length, length);
  const columns = columnsFor(block, Math.min(room, length));
  const inRow = block <= columns ? columns / block : 0; // number of blocks per row
  const tidy = inRow > 0 || block % columns === 0;
  const free = width - 2 * PADDING - Math.max(0, inRow - 1) * size.between;
  const stretch = isMap ? 1 : Math.min(1.9, free / (columns * size.width));
  const cell = { ...size, width: size.width * stretch };
  const place = (i) => {
    const row = Math.floor(i / columns), column = i % columns;
    const above = inRow || !tidy ? 0 : Math.floor((row * columns) / block);
    const left = inRow ? Math.floor(column / block) : 0;
    return [
      PADDING + column * cell.width + left * cell.between,
      PADDING + row * cell.height + above * cell.between,
    ];
  };
  const height = place(length - 1)[1] + cell.height + PADDING;
  return { columns, cell, place, height, block, tidy, isMap };
}

function columnsFor(block, room) {
  if (block <= room) return Math.floor(room / block) * block;
  for (let columns = room; columns >= room / 2; columns--) if (block % columns === 0) return columns;
  return room;
}

export class BoardView {
  // scroller: the scrolling element, which contains a canvas and a spacer.
  constructor(scroller, onCursor) {
    this.scroller = scroller;
    this.canvas = scroller.querySelector("canvas");
    this.spacer = scroller.querySelector(".spacer");
    this.trace = null;
    this.cursor = -1;
    this.isMap = null; // null: depends on the length
    this.onCursor = onCursor;
    scroller.addEventListener("scroll", () => this.redraw());
    new ResizeObserver(() => this.arrange()).observe(scroller);
    addEventListener("themechange", () => this.redraw());
    this.canvas.addEventListener("pointermove", (e) => this.point(this.positionAt(e)));
    this.canvas.addEventListener("pointerleave", () => this.point(-1));
    this.canvas.addEventListener("keydown", (e) => this.move(e));
    this.canvas.addEventListener("blur", () => this.point(-1));
  }

  show(trace, blockLength) {
    this.trace = trace;
    this.blockLength = blockLength;
    this.cursor = -1;
    this.scroller.scrollTop = 0;
    this.arrange();
  }

  get showsMap() {
    return this.isMap ?? (this.trace !== null && this.trace.length > LARGE);
  }

  arrange() {
    if (!this.trace) return;
    const { clientWidth } = this.scroller;
    this.layout = layout(this.trace.length, this.blockLength, clientWidth, this.showsMap);
    this.canvas.style.height = "0"; // A scroller without its own height gets that of the layout.
    this.spacer.style.height = `${this.layout.height}px`;
    const { clientHeight } = this.scroller;
    this.spacer.style.height = `${Math.max(0, this.layout.height - clientHeight)}px`;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(clientWidth * ratio);
    this.canvas.height = Math.round(clientHeight * ratio);
    this.canvas.style.width = `${clientWidth}px`;
    this.canvas.style.height = `${clientHeight}px`;
    this.redraw();
  }

  // Redraw at most once per screen frame, even if several steps arrive in that time.
  redraw() {
    if (this.pending || !this.trace) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.draw();
    });
  }

  draw() {
    const ink = inks(this.scroller);
    const context = this.canvas.getContext("2d");
    const ratio = devicePixelRatio || 1;
    const { clientWidth, clientHeight, scrollTop } = this.scroller;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, clientWidth, clientHeight);
    context.translate(0, -scrollTop);
    context.font = `12px ${ink.mono}`;
    context.textBaseline = "middle";
    const [first, end] = this.visible(scrollTop, scrollTop + clientHeight);
    for (let i = first; i < end; i++) this.cell(context, i, ink);
    if (this.cursor >= 0) this.ring(context, ink);
  }

  // The range of positions in visible rows.
  visible(top, bottom) {
    const { columns, place, cell } = this.layout;
    const rows = Math.ceil(this.trace.length / columns);
    const y = (row) => place(row * columns)[1];
    let first = lowest(rows, (row) => y(row) + cell.height > top);
    let end = lowest(rows, (row) => y(row) > bottom);
    return [first * columns, Math.min(end * columns, this.trace.length)];
  }

  cell(context, i, ink) {
    const { cell, place, isMap } = this.layout;
    const [x, y] = place(i);
    const w = cell.width - cell.gap, h = cell.height - cell.gap;
    const look = lookOf(this.trace, i, ink);
    if (look.state === ABSENT) return;
    context.globalAlpha = look.alpha;
    context.fillStyle = look.fill;
    if (isMap) context.fillRect(x, y, w, h);
    else tile(context, x, y, w, h);
    context.globalAlpha = 1;
    if (this.trace.view.guessed[i]) {
      context.fillStyle = look.text;
      context.fillRect(x + 2, y + h - 3, Math.min(8, w - 4), 1.5);
    }
    if (look.state === EDITED) notch(context, x, y, w, isMap ? 4 : 7, ink.accent);
    if (!this.layout.tidy && i % this.layout.block === 0) {
      context.fillStyle = ink.accent;
      context.fillRect(x - 1.5, y, 1, h);
    }
    if (look.state === UNUSED) outline(context, x, y, w, h, ink.line);
    if (isMap || look.state === UNUSED) return;
    if (look.state === MASKED) {
      context.fillStyle = ink.faint;
      context.fillRect(x + w / 2 - 1, y + h / 2 - 1, 2, 2);
    } else {
      context.fillStyle = look.text;
      fitted(context, this.trace.labelAt(i), x + 6, y + h / 2 + 0.5, w - 10);
    }
  }

  ring(context, ink) {
    const { cell, place } = this.layout;
    const [x, y] = place(this.cursor);
    context.strokeStyle = ink.ink;
    context.lineWidth = 1.5;
    context.strokeRect(x - 1, y - 1, cell.width - cell.gap + 2, cell.height - cell.gap + 2);
  }

  positionAt(event) {
    if (!this.trace) return -1;
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top + this.scroller.scrollTop;
    const { columns, place, cell } = this.layout;
    const rows = Math.ceil(this.trace.length / columns);
    const row = lowest(rows, (r) => place(r * columns)[1] + cell.height > y);
    for (let i = row * columns; i < Math.min((row + 1) * columns, this.trace.length); i++) {
      const [left, top] = place(i);
      if (x >= left && x < left + cell.width && y >= top) return i;
    }
    return -1;
  }

  point(i) {
    if (i === this.cursor) return;
    this.cursor = i;
    this.onCursor(i);
    this.redraw();
  }

  move(event) {
    if (!this.trace) return;
    const { columns } = this.layout;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns,
      Home: -this.trace.length, End: this.trace.length }[event.key];
    if (!by) return;
    event.preventDefault();
    const i = Math.max(0, Math.min(this.trace.length - 1, this.cursor + by));
    const [, y] = this.layout.place(i), { clientHeight, scrollTop } = this.scroller;
    if (y < scrollTop) this.scroller.scrollTop = y - PADDING;
    if (y + PADDING * 2 > scrollTop + clientHeight) this.scroller.scrollTop = y - clientHeight + 48;
    this.point(i);
  }

  // Scroll to the tokens that were committed last.
  follow() {
    const { frame } = this.trace;
    if (!frame || !frame.fresh.size) return;
    const [, y] = this.layout.place(Math.max(...frame.fresh));
    const { clientHeight, scrollTop } = this.scroller;
    if (y < scrollTop || y > scrollTop + clientHeight - 40) {
      this.scroller.scrollTop = y - clientHeight / 2;
    }
  }
}

// The look of a position: colour and opacity of its tile, and colour of its text.
export function lookOf(trace, i, ink) {
  const state = trace.view.state[i], confidence = trace.view.confidence[i];
  if (trace.isFresh(i)) return { state, fill: ink.accent, alpha: 1, text: ink.onAccent };
  if (state >= COMMITTED) {
    const isEnd = trace.isEnd(i);
    const alpha = (0.08 + 0.4 * confidence * confidence) * (isEnd ? 0.35 : 1);
    return { state, fill: ink.accent, alpha, text: isEnd ? ink.muted : ink.ink };
  }
  if (state === PROPOSED) {
    return { state, fill: ink.ink, alpha: 0.04 + 0.11 * confidence, text: ink.muted };
  }
  const isBlank = state === UNUSED || state === ABSENT;
  return { state, fill: ink.ink, alpha: isBlank ? 0 : 0.045, text: ink.faint };
}

// The current colours of the page, from its style sheet.
export function inks(element) {
  const style = getComputedStyle(element);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ink: of("ink"), muted: of("muted"), faint: of("faint"), line: of("line"), accent: of("accent"),
    onAccent: of("on-accent"), paper: of("paper"), mono: of("mono"),
  };
}

function tile(context, x, y, w, h) {
  context.beginPath();
  context.roundRect(x, y, w, h, 3);
  context.fill();
}

function outline(context, x, y, w, h, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  context.roundRect(x + 0.5, y + 0.5, w - 1, h - 1, 3);
  context.stroke();
}

function notch(context, x, y, w, size, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.moveTo(x + w - size, y);
  context.lineTo(x + w, y);
  context.lineTo(x + w, y + size);
  context.fill();
}

// Draw text, cut to a width in pixels; the font is monospaced.
function fitted(context, text, x, y, width) {
  const most = Math.max(1, Math.floor(width / 7.3));
  context.fillText(text.length > most ? `${text.slice(0, most - 1)}…` : text, x, y);
}

// The lowest number below `count` for which the monotonic `holds` is true, or `count` if none is.
function lowest(count, holds) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}
