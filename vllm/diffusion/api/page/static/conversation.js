// SPDX-License-Identifier: Apache-2.0
// The conversation: its turns, what a model is sent of them, and what a reload of the page brings back.

const KEY = "mosaic-conversation";
const MAX_KEPT = 400_000; // characters; browsers keep some millions a site

// Whether later requests hold an answer, and its question.
export const isSaid = (answer) => Boolean(answer?.isWhole && answer.text.trim());

export class Conversation {
  // turns: {question, answers}, the latter by a canvas' name {text, isWhole, isExact, isBad, note,
  // verdict}.
  constructor({ system = "", turns = [] } = {}) {
    this.system = system;
    this.turns = turns;
  }

  // Begin turn `k`, in place of what there was from it on.
  begin(k, question) {
    this.turns.length = k;
    this.turns.push({ question, answers: {} });
    return this.turns[k];
  }

  // Messages that ask turn `k`, as the canvas `name` has heard the turns before it. A canvas that was
  // not there heard what the first one did; turns without an answer were never said.
  messages(k, name) {
    const found = this.system.trim() ? [{ role: "system", content: this.system.trim() }] : [];
    for (const { question, answers } of this.turns.slice(0, k)) {
      const answer = answers[name] ?? answers.A;
      if (!isSaid(answer)) continue;
      found.push({ role: "user", content: question }, { role: "assistant", content: answer.text });
    }
    return [...found, { role: "user", content: this.turns[k].question }];
  }
}

// Keep a state for this tab: a value of which `turns` is a list. The oldest turns go where it is long.
export function keep(storage, state) {
  const kept = { ...state, turns: [...state.turns] };
  try {
    let text = JSON.stringify(kept);
    while (text.length > MAX_KEPT && kept.turns.length) {
      kept.turns.shift();
      text = JSON.stringify(kept);
    }
    storage.setItem(KEY, text);
  } catch {
    // A browser that keeps nothing: the conversation lives as long as the page.
  }
}

export function kept(storage) {
  try {
    const found = JSON.parse(storage.getItem(KEY));
    return Array.isArray(found?.turns) ? found : null;
  } catch {
    return null;
  }
}
