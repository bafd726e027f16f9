// SPDX-License-Identifier: Apache-2.0
// The conversation: its turns, the messages sent to the model, and the state kept for a reload.

const KEY = "mosaic-conversation";
const MAX_KEPT = 400_000; // characters; browsers store a few million per site

// Whether later requests include an answer and its question.
export const isSaid = (answer) => Boolean(answer?.isWhole && answer.text.trim());

export class Conversation {
  // turns: list of {question, answers}. answers: by canvas name {text, isWhole, isExact, isBad,
  // note, verdict}.
  constructor({ system = "", turns = [] } = {}) {
    this.system = system;
    this.turns = turns;
  }

  // Begin turn `k`, which replaces turn `k` and all later turns.
  begin(k, question) {
    this.turns.length = k;
    this.turns.push({ question, answers: {} });
    return this.turns[k];
  }

  // Messages that ask turn `k` on the canvas `name`, with the answers of that canvas to earlier turns.
  // If the canvas did not exist yet, the first canvas's answer is used. Turns without an answer are
  // left out.
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

// Store a state with a list `turns` for this tab. If it is too long, the oldest turns are dropped.
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
    // The browser refuses to store data: the conversation is lost when the page is closed.
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
