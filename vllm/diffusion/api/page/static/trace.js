// SPDX-License-Identifier: Apache-2.0
// The steps of one answer: each as what it changed, so that going to any step costs what lies between.

export const MASKED = 0, PROPOSED = 1, COMMITTED = 2, EDITED = 3;

// The parts of a position's state, in the order of a change's two halves.
const PARTS = ["ids", "confidence", "state"];

class Board {
  constructor(length) {
    this.ids = new Int32Array(length).fill(-1);
    this.confidence = new Float32Array(length);
    this.state = new Uint8Array(length);
  }
}

export class Trace {
  constructor(length) {
    this.length = length;
    this.frames = []; // {step, seconds, positions, before, after, fresh}
    this.texts = new Map(); // token id -> text
    this.view = new Board(length); // as shown
    this.at = -1; // the frame that is shown; -1: the empty canvas
    this.head = new Board(length); // as the newest frame has it
    this.numCommitted = 0;
  }

  // Take in the canvas of a server's event. Returns the new frame.
  push(canvas, seconds) {
    const changed = [];
    for (let i = 0; i < this.length; i++) {
      if (this.take(i, canvas)) changed.push(i);
    }
    const frame = this.record(changed, canvas, seconds);
    const follows = this.at === this.frames.length - 1;
    this.frames.push(frame);
    if (follows) this.seek(this.frames.length - 1);
    return frame;
  }

  // Whether position i of a canvas differs from what is known of it; notes its text.
  take(i, canvas) {
    const id = canvas.token_ids[i];
    if (!this.texts.has(id)) this.texts.set(id, canvas.text[i]);
    return (
      id !== this.head.ids[i] ||
      stateOf(canvas, i, this.head) !== this.head.state[i] ||
      Math.fround(canvas.confidence[i] ?? 0) !== this.head.confidence[i]
    );
  }

  record(changed, canvas, seconds) {
    const count = changed.length;
    const half = () => ({
      ids: new Int32Array(count), confidence: new Float32Array(count), state: new Uint8Array(count),
    });
    const before = half(), after = half(), fresh = [];
    changed.forEach((i, k) => {
      for (const part of PARTS) before[part][k] = this.head[part][i];
      const state = stateOf(canvas, i, this.head);
      const isNew = state >= COMMITTED &&
        (this.head.state[i] < COMMITTED || this.head.ids[i] !== canvas.token_ids[i]);
      if (isNew) fresh.push(i);
      if (state >= COMMITTED && this.head.state[i] < COMMITTED) this.numCommitted++;
      this.head.ids[i] = after.ids[k] = canvas.token_ids[i];
      this.head.confidence[i] = after.confidence[k] = canvas.confidence[i] ?? 0;
      this.head.state[i] = after.state[k] = state;
    });
    const positions = Uint32Array.from(changed);
    const committed = this.numCommitted;
    return { step: canvas.step, seconds, positions, before, after, committed, fresh: new Set(fresh) };
  }

  // Show frame `index`.
  seek(index) {
    const wanted = Math.max(-1, Math.min(index, this.frames.length - 1));
    while (this.at < wanted) this.apply(this.frames[++this.at], "after");
    while (this.at > wanted) this.apply(this.frames[this.at--], "before");
  }

  apply(frame, half) {
    frame.positions.forEach((i, k) => {
      for (const part of PARTS) this.view[part][i] = frame[half][part][k];
    });
  }

  get frame() {
    return this.frames[this.at];
  }

  // Whether a position was committed, or changed, by the step that is shown.
  isFresh(i) {
    return this.at >= 0 && this.frame.fresh.has(i);
  }

  textAt(i) {
    return this.view.state[i] === MASKED ? "" : this.texts.get(this.view.ids[i]) ?? "";
  }

  // Tokens that each frame committed, for the timeline.
  commits() {
    return this.frames.map((f, k) => f.committed - (k ? this.frames[k - 1].committed : 0));
  }
}

function stateOf(canvas, i, head) {
  if (canvas.committed[i]) {
    const wasCommitted = head.state[i] >= COMMITTED;
    if (wasCommitted && head.ids[i] !== canvas.token_ids[i]) return EDITED;
    return wasCommitted ? head.state[i] : COMMITTED;
  }
  return canvas.confidence[i] == null ? MASKED : PROPOSED;
}

const SPECIAL = /^(<\|.*\|>|<[^ <>]+>|\[[A-Z]+\])$/;

export const isSpecial = (text) => SPECIAL.test(text);

// A token as one short line: what cannot be seen has a sign.
export function shown(text) {
  if (isSpecial(text)) return "end";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").trim() || (text ? "␣" : "");
}
