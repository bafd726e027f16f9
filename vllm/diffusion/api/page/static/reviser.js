// SPDX-License-Identifier: Apache-2.0
// The dialog that asks the model to revise a text, with parts of it locked.

import { element } from "./elements.js";
import { inCharacters, locked, moved, partsOf } from "./ranges.js";

export class Reviser {
  // limits: names of the fields that limit how much of a text changes. revise: called with the
  // fields of a request that revises a text.
  constructor(dialog, limits, revise) {
    this.dialog = dialog;
    this.limits = limits;
    this.find = (name) => dialog.querySelector(`[name="${name}"]`);
    this.view = dialog.querySelector(".locked");
    this.box = this.find("text");
    for (const label of dialog.querySelectorAll("label:has(input)")) {
      label.hidden = !limits.includes(label.querySelector("input").name);
    }
    this.box.addEventListener("input", () => this.take(this.box.value));
    this.find("lock").addEventListener("click", () => this.lock());
    this.find("unlock").addEventListener("click", () => this.setRanges([]));
    dialog.addEventListener("close", () => {
      if (dialog.returnValue === "revise") revise(this.fields);
    });
  }

  show(text) {
    this.text = this.box.value = text;
    this.setRanges([]);
    this.dialog.returnValue = "";
    this.dialog.showModal();
    this.box.focus();
    this.box.setSelectionRange(0, 0);
  }

  take(text) {
    const ranges = moved(this.ranges, this.text, text);
    this.text = text;
    this.setRanges(ranges);
  }

  lock() {
    this.setRanges(locked(this.ranges, [this.box.selectionStart, this.box.selectionEnd]));
    this.box.focus();
  }

  setRanges(ranges) {
    this.ranges = ranges;
    const parts = partsOf(ranges, this.text);
    this.view.replaceChildren(...parts.map(([part, isLocked]) => element(isLocked ? "mark" : "span", "", part)));
    this.view.hidden = this.find("unlock").disabled = !ranges.length;
    this.find("revise").disabled = !this.text.trim();
  }

  // Fields of POST /generate.
  get fields() {
    const given = ["edit_threshold", "max_edits", "slack"].map((name) => [name, this.find(name).value])
      .filter(([name, value]) => this.limits.includes(name) && value !== "");
    return {
      canvas_text: this.text,
      pinned: inCharacters(this.ranges, this.text),
      ...Object.fromEntries(given.map(([name, value]) => [name, Number(value)])),
      return_diff: true,
    };
  }
}

// The lines of a unified diff, without its headings and remarks.
export function linesOf(diff) {
  const lines = diff.split("\n").filter((line) => line && !/^(---|\+\+\+|@@|\\)/.test(line));
  const kinds = { "+": "added", "-": "removed" };
  return lines.map((line) => element("span", kinds[line[0]] ?? "", `${line}\n`));
}
