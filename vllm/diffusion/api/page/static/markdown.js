// SPDX-License-Identifier: Apache-2.0
// Converts Markdown to elements. HTML in it is shown as text and never becomes elements.

import { frameCode } from "./code.js";
import { formulaExtensions, setFormulas } from "./formulas.js";
import { Marked } from "./vendor/marked/marked.esm.js";
import "./vendor/purify/purify.min.js";

const SIGNS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const written = (text) => text.replace(/[&<>"]/g, (sign) => SIGNS[sign]);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => written(text),
    image: ({ raw }) => written(raw), // The page loads nothing from other hosts.
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
  extensions: formulaExtensions(written),
});

// Elements and attributes that Markdown can produce; all others are removed.
const POLICY = {
  ALLOWED_TAGS: [
    ...["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "li", "span"],
    ...["strong", "em", "del", "a", "code", "pre", "table", "thead", "tbody", "tr", "th", "td"],
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

export function elementsOf(text) {
  const found = globalThis.DOMPurify.sanitize(marked.parse(text), POLICY);
  for (const link of found.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const box of found.querySelectorAll("pre, table")) box.tabIndex = 0; // wide ones scroll, also by keyboard
  frameCode(found);
  setFormulas(found);
  return found;
}
