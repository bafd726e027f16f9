// SPDX-License-Identifier: Apache-2.0
// The steps of one answer. Each is stored as a list of changes, so that moving between two steps
// costs only the changes between them.

// States of a position; committed states have the highest numbers. UNUSED: after the answer's end.
// ABSENT: the canvas has not grown that far yet.
export const MASKED = 0, PROPOSED = 1, UNUSED = 2, ABSENT = 3, COMMITTED = 4, EDITED = 5;

// The parts of a position's state, which a change stores before and after the step.
const PARTS = ["ids", "confidence", "state", "guessed"];

class Board {
  constructor(length) {
    this.ids = new Int32Array(length).fill(-1);
    this.confidence = new Float32Array(length);
    this.state = new Uint8Array(length);
    this.guessed = new Uint8Array(length); // 1: committed by an accepted draft
  }

  // A copy with absent positions at the end.
  grown(length) {
    const board = new Board(length);
    for (const part of PARTS) board[part].set(this[part]);
    board.state.fill(ABSENT, this.state.length);
    return board;
  }
}

export class Trace {
  // ends: ids of the tokens that end an answer.
  constructor(length, ends = []) {
    this.length = length;
    this.ends = new Set(ends);
    this.frames = []; // {step, seconds, length, positions, before, after, committed, fresh}
    this.texts = new Map(); // token id -> text
    this.view = new Board(length); // the frame that is shown
    this.at = -1; // index of the shown frame; -1: the empty canvas
    this.head = new Board(length); // the latest frame
    this.numCommitted = 0;
  }

  // Continue on a longer canvas, whose new positions are absent in earlier frames.
  grow(length) {
    this.length = length;
    this.view = this.view.grown(length);
    this.head = this.head.grown(length);
  }

  // Append the canvas of a server's event. Returns the new frame.
  push(canvas, seconds) {
    const changed = [];
    for (let i = 0; i < this.length; i++) {
      if (this.take(i, canvas)) changed.push(i);
    }
    return this.append(this.record(changed, canvas, seconds));
  }

  append(frame) {
    const follows = this.at === this.frames.length - 1;
    this.frames.push(frame);
    if (follows) this.seek(this.frames.length - 1);
    return frame;
  }

  // Mark the answer as complete: append a last frame without fresh tokens, in which all
  // positions that no step has committed are unused.
  settle() {
    const { step = 0, seconds = 0, committed = 0 } = this.frames.at(-1) ?? {};
    const left = [...this.head.state.keys()].filter((i) => this.head.state[i] < COMMITTED);
    const before = halfOf(left.length), after = halfOf(left.length);
    left.forEach((i, k) => {
      for (const part of PARTS) before[part][k] = after[part][k] = this.head[part][i];
      after.state[k] = this.head.state[i] = UNUSED;
    });
    const positions = Uint32Array.from(left);
    const { length } = this;
    this.append({ step, seconds, length, positions, before, after, committed, fresh: new Set() });
  }

  // Whether position i of a canvas differs from the latest frame; also stores its text.
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
    const before = halfOf(count), after = halfOf(count), fresh = [];
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
      this.head.guessed[i] = after.guessed[k] = Number(state >= COMMITTED && !!canvas.guessed?.[i]);
    });
    const positions = Uint32Array.from(changed);
    const { length, numCommitted: committed } = this, { step } = canvas;
    return { step, seconds, length, positions, before, after, committed, fresh: new Set(fresh) };
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

  // Step, length and committed tokens of the canvas that is shown.
  get shown() {
    const length = this.frames[0]?.length ?? this.length;
    return this.frame ?? { step: 0, length, committed: 0 };
  }

  // Whether the shown step committed or changed a position.
  isFresh(i) {
    return this.at >= 0 && this.frame.fresh.has(i);
  }

  // Whether an accepted draft committed any token.
  get hasGuesses() {
    return this.head.guessed.includes(1);
  }

  textAt(i) {
    const isEmpty = [MASKED, UNUSED, ABSENT].includes(this.view.state[i]);
    return isEmpty ? "" : this.texts.get(this.view.ids[i]) ?? "";
  }

  isEnd(i) {
    return this.ends.has(this.view.ids[i]);
  }

  // The label on a position's tile.
  labelAt(i) {
    const text = this.textAt(i);
    return text && this.isEnd(i) ? "end" : shown(text);
  }

  // Number of committed tokens in the latest step: tokens that end the answer, and all others.
  counted() {
    let numEnds = 0;
    this.head.ids.forEach((id, i) => {
      if (this.head.state[i] >= COMMITTED && this.ends.has(id)) numEnds++;
    });
    return { numEnds, numOthers: this.numCommitted - numEnds };
  }

  // Number of tokens that each frame committed, for the timeline.
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

const halfOf = (count) => ({
  ids: new Int32Array(count), confidence: new Float32Array(count),
  state: new Uint8Array(count), guessed: new Uint8Array(count),
});

// A token as one short line, with signs for invisible characters.
export function shown(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").trim() || (text ? "␣" : "");
}
