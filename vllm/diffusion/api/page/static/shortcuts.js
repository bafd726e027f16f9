// SPDX-License-Identifier: Apache-2.0
// Keyboard shortcuts, and the list of them.

import { element } from "./elements.js";

const CONTROL = /Mac|iP/.test(navigator.platform) ? "⌘" : "Ctrl";

// What a key does, by the name of an act; the others are the browser's and the question box's.
const SHORTCUTS = [
  { keys: ["Enter"], does: "send the question" },
  { keys: ["Shift", "Enter"], does: "begin a new line" },
  { keys: ["↑"], does: "edit the last question, if the box is empty" },
  { keys: ["Esc"], does: "stop the answer, or leave the edit", act: "stop", key: "escape" },
  { keys: [CONTROL, "Shift", "O"], does: "begin a new conversation", act: "clear", key: "o", isShifted: true },
  { keys: [CONTROL, "K"], does: "open the history", act: "history", key: "k" },
  { keys: [CONTROL, "/"], does: "show this list", act: "help", key: "/" },
];

// Call the acts, {stop, clear, history, help}, when their keys are pressed outside of dialogs.
export function bindShortcuts(acts) {
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const key = event.key.toLowerCase();
    const hasControl = event.ctrlKey || event.metaKey;
    const found = SHORTCUTS.find((one) => one.key === key &&
      (key === "escape" || (hasControl && event.shiftKey === Boolean(one.isShifted))));
    if (!found) return;
    event.preventDefault();
    acts[found.act]();
  });
}

// Fill the list of a dialog and show it.
export function showShortcuts(dialog) {
  dialog.querySelector("dl").replaceChildren(...SHORTCUTS.map(({ keys, does }) => {
    const row = element("div"), term = element("dt");
    term.append(...keys.map((key) => element("kbd", "", key)));
    row.append(term, element("dd", "", does));
    return row;
  }));
  dialog.showModal();
}
