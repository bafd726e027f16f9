// SPDX-License-Identifier: Apache-2.0
// Sets formulas with KaTeX, which is loaded when the first formula appears.

const DELIMITERS = [["$$", "$$"], ["\\[", "\\]"], ["\\(", "\\)"], ["$", "$"]];
// A single dollar begins a formula only before a character, and ends it only after one and not
// before a digit, so that prices stay text.
const INLINE =
  /^(?:\$\$[^]+?\$\$|\\\[[^]+?\\\]|\\\([^]+?\\\)|\$(?!\s)(?:\\[^\n]|[^\\$\n])+?(?<!\s)\$(?!\d))/;
const BLOCK = /^ {0,3}(?:\$\$[^]+?\$\$|\\\[[^]+?\\\])[ \t]*(?:\n|$)/;
// KaTeX's MathML sets style attributes, which the page's policy forbids.
const OPTIONS = {
  output: "html", throwOnError: true, strict: "ignore", trust: false, maxSize: 20, maxExpand: 500,
};

let katex = null, loading = null;

// Extensions of marked. written: escapes text for HTML.
export function formulaExtensions(written) {
  const extension = (name, level, pattern, start, tag) => ({
    name,
    level,
    start: (source) => source.match(start)?.index,
    tokenizer(source) {
      const found = pattern.exec(source);
      return found ? { type: name, raw: found[0] } : undefined;
    },
    renderer: ({ raw }) => `<${tag} class="formula">${written(raw.trim())}</${tag}>`,
  });
  return [
    extension("formulas", "block", BLOCK, /^ {0,3}(?:\$\$|\\\[)/m, "p"),
    extension("formula", "inline", INLINE, /\$|\\[[(]/, "span"),
  ];
}

// Set the formulas of an answer. One that KaTeX cannot read stays as the model wrote it.
export function setFormulas(fragment) {
  const found = [...fragment.querySelectorAll(".formula")];
  if (!found.length) return;
  if (katex) found.forEach(setFormula);
  else load().then(() => found.forEach(setFormula), () => {});
}

function setFormula(box) {
  const text = box.textContent;
  const [opening, closing] = DELIMITERS.find(([sign]) => text.startsWith(sign));
  const displayMode = opening === "$$" || opening === "\\[";
  try {
    const source = text.slice(opening.length, text.length - closing.length);
    katex.render(source, box, { ...OPTIONS, displayMode });
    box.setAttribute("role", "math");
    box.setAttribute("aria-label", source.trim());
    if (displayMode) box.tabIndex = 0; // a wide one scrolls, also by keyboard
  } catch {
    box.textContent = text;
  }
}

function load() {
  loading ??= import("./vendor/katex/katex.min.js").then(() => {
    const href = new URL("./vendor/katex/katex.min.css", import.meta.url).href;
    document.head.append(Object.assign(document.createElement("link"), { rel: "stylesheet", href }));
    katex = globalThis.katex;
  });
  return loading;
}
