// SPDX-License-Identifier: Apache-2.0
// A conversation: a tree of turns, of which one branch is shown, and the messages for the model.

const MAX_NAME = 80; // characters
const ROOT = -1;

// Whether later requests include an answer and its question.
export const isSaid = (answer) => Boolean(answer?.isWhole && answer.text.trim());

export class Conversation {
  // turns: all turns in the order in which they were asked, {question, answers, parent}. answers: by
  // canvas name {text, diff, isWhole, isExact, isBad, note, verdict, speed}. parent: index of the turn that
  // it follows, -1 for a first turn; without it, a turn follows the one before it in the list.
  // leaf: index of the last turn of the branch that is shown. title: the user's, or "".
  // revision: how often the conversation was stored.
  constructor({ id = newId(), title = "", system = "", turns = [], leaf, changed = 0, revision = 0 } = {}) {
    Object.assign(this, { id, title, system, changed, revision });
    this.turns = turns.map((turn, k) => ({ ...turn, parent: turn.parent ?? k - 1 }));
    this.leaf = leaf ?? this.turns.length - 1;
  }

  // The conversation in a link or a file of unknown origin; throws if there is none.
  static read({ title = "", system = "", turns = [], leaf, changed }) {
    const read = turns.map(({ question, answers, parent }, k) => {
      if (parent !== undefined && !isIndex(parent, ROOT, k)) throw new Error(`turn ${k}: parent ${parent}`);
      const all = Object.entries(answers).map(([name, answer]) => [name, readAnswer(answer)]);
      return { question: String(question), answers: Object.fromEntries(all), parent };
    });
    return new Conversation({
      title: String(title), system: String(system), turns: read,
      leaf: isIndex(leaf, 0, read.length) ? leaf : undefined, changed: Date.parse(changed) || Date.now(),
    });
  }

  // What is stored.
  get record() {
    const { id, title, system, turns, leaf, changed, revision } = this;
    return { id, title, system, turns, leaf, changed, revision };
  }

  // The user's title, or the first question.
  get name() {
    const line = this.title || (this.turns[0]?.question.trim().split("\n")[0] ?? "");
    return line.length > MAX_NAME ? `${line.slice(0, MAX_NAME - 1)}…` : line;
  }

  // Indices of the turns that are shown.
  get indices() {
    const found = [];
    for (let i = this.leaf; i !== ROOT; i = this.turns[i].parent) found.unshift(i);
    return found;
  }

  // The turns that are shown.
  get shown() {
    return this.indices.map((i) => this.turns[i]);
  }

  // Ask a question as turn `k`. If there is a turn `k`, the new turn becomes a branch beside it.
  begin(k, question) {
    const parent = k ? this.indices[k - 1] : ROOT;
    this.turns.push({ question, answers: {}, parent });
    this.leaf = this.turns.length - 1;
    this.changed = Date.now();
    return this.turns[this.leaf];
  }

  // The branches at turn `k`: the indices of their first turns, and which one is shown.
  branches(k) {
    const own = this.indices[k];
    const all = this.childrenOf(this.turns[own].parent);
    return { all, at: all.indexOf(own) };
  }

  // Show another branch at turn `k`: the next one, or the one before it if `by` is -1.
  choose(k, by) {
    const { all, at } = this.branches(k);
    this.leaf = this.newestBelow(all[Math.max(0, Math.min(at + by, all.length - 1))]);
  }

  // Remove the last turn if it has no answers, because the page was closed before; returns it.
  dropUnanswered() {
    const open = this.turns.at(-1);
    if (!open || Object.keys(open.answers).length) return null;
    this.turns.pop();
    this.leaf = this.newestBelow(open.parent);
    return open;
  }

  // Messages that ask turn `k` on the canvas `name`, with the answers of that canvas to earlier turns.
  // If the canvas did not exist yet, the first canvas's answer is used. Turns without an answer are
  // left out.
  messages(k, name) {
    const found = this.system.trim() ? [{ role: "system", content: this.system.trim() }] : [];
    const { shown } = this;
    for (const { question, answers } of shown.slice(0, k)) {
      const answer = answers[name] ?? answers.A;
      if (!isSaid(answer)) continue;
      found.push({ role: "user", content: question }, { role: "assistant", content: answer.text });
    }
    return [...found, { role: "user", content: shown[k].question }];
  }

  childrenOf(parent) {
    return [...this.turns.keys()].filter((i) => this.turns[i].parent === parent);
  }

  newestBelow(index) {
    const newest = this.childrenOf(index).at(-1);
    return newest === undefined ? index : this.newestBelow(newest);
  }
}

const isIndex = (value, first, end) => Number.isInteger(value) && value >= first && value < end;

function readAnswer({ text = "", diff = "", isWhole, isExact, isBad, note = "", speed }) {
  const { tokens, seconds, steps } = speed ?? {};
  return {
    text: String(text), diff: String(diff), isWhole: Boolean(isWhole), isExact: Boolean(isExact), isBad: Boolean(isBad),
    note: String(note), speed: [tokens, seconds, steps].every(Number.isFinite) ? speed : null,
  };
}

// Servers without TLS have no crypto.randomUUID.
export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
