// SPDX-License-Identifier: Apache-2.0
// Code in answers: a copy button for every block, and colours. The library that colours is loaded
// when the first block appears.

import { button, element } from "./elements.js";
import { copy } from "./request.js";

const MAX_COLOURED = 50_000; // characters; longer code stays plain

let hljs = null, loading = null;

// Frame the blocks of code of an answer.
export function frameCode(fragment) {
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code");
    const language = /^language-(\S+)$/.exec(code?.className ?? "")?.[1] ?? "";
    const frame = element("div", "code"), head = element("div", "head");
    const copied = button("Copy", "Copy this code", async () => {
      await copy(pre.textContent);
      copied.textContent = "Copied";
      setTimeout(() => (copied.textContent = "Copy"), 1600);
    });
    head.append(element("span", "", language || "code"), copied);
    pre.replaceWith(frame);
    frame.append(head, pre);
    if (language) colour(code, language);
  }
}

async function colour(code, language) {
  if (code.textContent.length > MAX_COLOURED) return;
  if (!hljs) {
    loading ??= import("./languages.js");
    hljs = (await loading.catch(() => null))?.default ?? null;
  }
  if (!hljs?.getLanguage(language)) return;
  const { value } = hljs.highlight(code.textContent, { language, ignoreIllegals: true });
  const policy = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };
  code.replaceChildren(globalThis.DOMPurify.sanitize(value, policy));
}
