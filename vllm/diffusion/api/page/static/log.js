// SPDX-License-Identifier: Apache-2.0
// The conversation as shown to the user: one article per turn, with its buttons.

import { isSaid } from "./conversation.js";
import { elementsOf } from "./markdown.js";
import { copy } from "./request.js";

const element = (tag, className, text = "") =>
  Object.assign(document.createElement(tag), { className, textContent: text });

export class Log {
  // box: the element that holds the turns. acts: {edit, again}, called with a turn's number.
  constructor(box, acts) {
    this.box = box;
    this.acts = acts;
    this.turns = [];
  }

  // Show `turns`; the first `same` are shown already. names: names of the canvases that answer.
  show(turns, same, names) {
    for (const old of this.turns.splice(same)) old.remove();
    turns.slice(same).forEach((turn, k) => {
      const shown = this.turnOf(turn, same + k, names);
      this.turns.push(shown);
      this.box.append(shown);
    });
  }

  turnOf({ question, answers }, k, names) {
    const turn = element("article", "turn");
    turn.setAttribute("aria-label", `Turn ${k + 1}`);
    const copied = button("Copy", `Copy answer ${k + 1}`, () => this.copy(turn, copied));
    const acts = element("div", "acts");
    acts.append(
      copied,
      button("Regenerate", `Regenerate answer ${k + 1}`, () => this.acts.again(k)),
      button("Edit", `Edit question ${k + 1}`, () => this.acts.edit(k)),
    );
    turn.append(element("p", "mine", question));
    for (const name of Object.keys(answers).length ? Object.keys(answers) : names) {
      const answer = element("div", "answer");
      answer.dataset.name = name;
      answer.append(element("div", "text"), element("p", "note"), element("p", "verdict"));
      turn.append(answer);
      fill(answer, answers[name] ?? { isOver: false });
    }
    turn.append(acts);
    return turn;
  }

  // Show the complete or partial answer of a canvas to turn `k`.
  fill(k, name, found) {
    const answer = this.turns[k]?.querySelector(`.answer[data-name="${name}"]`);
    if (answer) fill(answer, found);
  }

  // Copy the answers as the model wrote them, without formatting.
  async copy(turn, act) {
    const answers = [...turn.querySelectorAll(".answer")];
    await copy(answers.map((answer) => answer.source ?? "").join("\n\n"));
    act.textContent = "Copied";
    setTimeout(() => (act.textContent = "Copy"), 1600);
  }
}

function button(text, label, act) {
  const found = element("button", "quiet", text);
  found.type = "button";
  found.setAttribute("aria-label", label);
  found.addEventListener("click", act);
  return found;
}

// An answer that must match a format is shown unchanged; other answers are rendered as Markdown.
function fill(answer, found) {
  const { text = "", isOver = true, isExact = false, isBad = false, note = "", verdict = null } = found;
  const [body, noted, judged] = answer.children;
  answer.source = text;
  answer.dataset.said = !isOver || isSaid(found); // later turns send it to the model
  body.classList.toggle("open", !isOver);
  body.classList.toggle("exact", isExact);
  body.replaceChildren(isExact ? text : elementsOf(text));
  body.hidden = isOver && !text.trim();
  Object.assign(noted, { textContent: note, hidden: !note });
  noted.dataset.bad = isBad;
  judged.hidden = verdict === null;
  if (verdict === null) return;
  const [isMatch, words] = verdict;
  judged.textContent = words;
  judged.dataset.match = isMatch;
}
