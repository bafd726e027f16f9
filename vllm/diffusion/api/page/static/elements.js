// SPDX-License-Identifier: Apache-2.0
// Makes elements of the page.

export const element = (tag, className, text = "") =>
  Object.assign(document.createElement(tag), { className, textContent: text });

// label: the name for screen readers, or "" if it is the text.
export function button(text, label, act) {
  const found = element("button", "quiet", text);
  found.type = "button";
  if (label) found.setAttribute("aria-label", label);
  found.addEventListener("click", act);
  return found;
}
