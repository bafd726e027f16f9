// SPDX-License-Identifier: Apache-2.0
// The conversation as shown to the user: one article per turn, with its buttons.

import { isSaid } from "./conversation.js";
import { button, element } from "./elements.js";
import { elementsOf } from "./markdown.js";
import { copy } from "./request.js";
import { linesOf } from "./reviser.js";

export class Log {
  // box: the element that holds the turns. acts: {edit, again, choose}, and {revise} if the model
  // revises texts; called with a turn's number.
  constructor(box, acts) {
    this.box = box;
    this.acts = acts;
    this.turns = [];
  }

  // Show a conversation; its first `same` turns are shown already. names: names of the canvases that
  // answer.
  show(conversation, same, names) {
    for (const old of this.turns.splice(same)) old.remove();
    conversation.shown.slice(same).forEach((turn, k) => {
      const shown = this.turnOf(turn, same + k, names, conversation.branches(same + k));
      this.turns.push(shown);
      this.box.append(shown);
    });
  }

  turnOf({ question, answers }, k, names, branches) {
    const turn = element("article", "turn");
    turn.setAttribute("aria-label", `Turn ${k + 1}`);
    const copied = button("Copy", `Copy answer ${k + 1}`, () => this.copy(turn, copied));
    const acts = element("div", "acts");
    acts.append(
      ...this.arrowsOf(k, branches),
      copied,
      button("Regenerate", `Regenerate answer ${k + 1}`, () => this.acts.again(k)),
      button("Edit", `Edit question ${k + 1}`, () => this.acts.edit(k)),
    );
    if (this.acts.revise) acts.append(button("Revise", `Revise answer ${k + 1}`, () => this.acts.revise(k)));
    turn.append(element("p", "mine", question));
    for (const name of Object.keys(answers).length ? Object.keys(answers) : names) {
      const answer = element("div", "answer");
      answer.dataset.name = name;
      answer.append(...["text", "diff", "note", "verdict", "speed"].map((part) =>
        element({ text: "div", diff: "pre" }[part] ?? "p", part)));
      turn.append(answer);
      fill(answer, answers[name] ?? { isOver: false });
    }
    turn.append(acts);
    return turn;
  }

  // Buttons that show another branch at turn `k`, if there is more than one.
  arrowsOf(k, { all, at }) {
    if (all.length < 2) return [];
    const arrow = (sign, label, by) => {
      const found = button(sign, `${label} version of turn ${k + 1}`, () => this.choose(k, by));
      found.classList.add("arrow");
      found.disabled = all[at + by] === undefined;
      return found;
    };
    const count = element("span", "count", `${at + 1}/${all.length}`);
    count.setAttribute("aria-label", `Version ${at + 1} of ${all.length}`);
    count.setAttribute("role", "img");
    return [arrow("‹", "Previous", -1), count, arrow("›", "Next", 1)];
  }

  // Show another branch, and keep the focus on the arrow, or on the other one at the end.
  choose(k, by) {
    this.acts.choose(k, by);
    const arrows = [...this.turns[k].querySelectorAll(".arrow")];
    if (by > 0) arrows.reverse();
    arrows.find((arrow) => !arrow.disabled)?.focus();
  }

  // Show the complete or partial answer of a canvas to turn `k`.
  fill(k, name, found) {
    const answer = this.turns[k]?.querySelector(`.answer[data-name="${name}"]`);
    if (!answer) return;
    // Partial answers are drawn at most once per screen frame.
    cancelAnimationFrame(answer.pending);
    if (found.isOver === false) answer.pending = requestAnimationFrame(() => this.draw(answer, found));
    else this.draw(answer, found);
  }

  // Fill an answer. A reader at the end of the log stays there.
  draw(answer, found) {
    const { box } = this;
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 8;
    fill(answer, found);
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  // Copy the answers as the model wrote them, without formatting.
  async copy(turn, act) {
    const answers = [...turn.querySelectorAll(".answer")];
    await copy(answers.map((answer) => answer.source ?? "").join("\n\n"));
    act.textContent = "Copied";
    setTimeout(() => (act.textContent = "Copy"), 1600);
  }
}

// An answer that must match a format is shown unchanged; other answers are rendered as Markdown.
function fill(answer, found) {
  const { text = "", isOver = true, isExact = false, isBad = false, note = "" } = found;
  const { verdict = null, speed = null, diff = "" } = found;
  const [body, changed, noted, judged, measured] = answer.children;
  answer.source = text;
  answer.dataset.said = !isOver || isSaid(found); // later turns send it to the model
  body.classList.toggle("open", !isOver);
  body.classList.toggle("exact", isExact);
  body.replaceChildren(isExact ? text : elementsOf(text));
  body.hidden = isOver && !text.trim();
  changed.replaceChildren(...linesOf(diff));
  changed.hidden = !diff;
  Object.assign(noted, { textContent: note, hidden: !note });
  noted.dataset.bad = isBad;
  Object.assign(measured, { textContent: speed ? speedOf(speed) : "", hidden: !speed });
  judged.hidden = verdict === null;
  if (verdict === null) return;
  const [isMatch, words] = verdict;
  judged.textContent = words;
  judged.dataset.match = isMatch;
}

function speedOf({ tokens, seconds, steps }) {
  const rate = tokens / seconds;
  return [
    `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`,
    `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`,
    `${steps} ${steps === 1 ? "step" : "steps"}`,
  ].join(" · ");
}
