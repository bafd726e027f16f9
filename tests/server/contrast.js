// SPDX-License-Identifier: Apache-2.0
// Finds the text of a page with too little contrast, by WCAG 2's ratio. The value of this script is
// a promise of ["text: ratio", ...]. A canvas has no text nodes, so that the script computes the
// look of every kind of tile instead.

(async () => {
  const WANTED = 4.5;
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });

  // Return red, green, blue and opacity of a CSS colour, from 0 to 1.
  function parts(colour) {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].map((value) => value / 255);
  }

  const over = ([r, g, b, a], below) => [r, g, b].map((v, k) => v * a + below[k] * (1 - a));

  function brightness(rgb) {
    const [r, g, b] = rgb.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  function ratio(one, other) {
    const [low, high] = [brightness(one), brightness(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  }

  function ancestors(element) {
    const found = [];
    for (let e = element; e; e = e.parentElement) found.unshift(getComputedStyle(e));
    return found;
  }

  // Return the contrast between an element's text and its background.
  function standsOut(element, colour) {
    const isDark = getComputedStyle(document.documentElement).colorScheme === "dark";
    let below = parts(isDark ? "black" : "white").slice(0, 3);
    let opacity = 1;
    for (const style of ancestors(element)) {
      below = over(parts(style.backgroundColor), below);
      opacity *= Number(style.opacity);
    }
    const [r, g, b, a] = parts(colour);
    return ratio(over([r, g, b, a * opacity], below), below);
  }

  const weak = [];
  const judge = (text, found) => {
    if (found < WANTED) weak.push(`${text.trim().slice(0, 40)}: ${found.toFixed(2)}`);
  };
  let count = 0;
  for (const element of document.body.querySelectorAll("*")) {
    if (!element.checkVisibility() || element.matches("[type=range], [type=checkbox]")) continue;
    if (element.closest(".hidden, svg, template")) continue;
    const style = getComputedStyle(element);
    const own = [...element.childNodes].filter((n) => n.nodeType === Node.TEXT_NODE);
    const text = own.map((n) => n.data).join("") || element.value || "";
    if (text.trim()) judge(text, standsOut(element, style.color)), count++;
    if (element.placeholder && !element.value) {
      judge(element.placeholder, standsOut(element, getComputedStyle(element, "::placeholder").color));
    }
    for (const part of ["::before", "::after"]) {
      const made = getComputedStyle(element, part);
      if (!/\w|…|✓|✗/.test(made.content.replace(/^(none|normal)$/, ""))) continue;
      judge(made.content, standsOut(element, made.color));
    }
  }
  if (!count) weak.push("no text was found");

  const scroller = document.querySelector(".scroller");
  if (scroller) {
    const { inks, lookOf } = await import("/page/board.js");
    const { COMMITTED, EDITED, PROPOSED } = await import("/page/trace.js");
    const ink = inks(scroller), paper = parts(ink.paper).slice(0, 3);
    for (const state of [PROPOSED, COMMITTED, EDITED]) {
      for (const confidence of [0, 0.2, 0.4, 0.6, 0.8, 1]) {
        for (const [isFresh, isEnd] of [[false, false], [false, true], [true, false]]) {
          const view = { state: [state], confidence: [confidence] };
          const look = lookOf({ view, isFresh: () => isFresh, isEnd: () => isEnd }, 0, ink);
          const fill = over([...parts(look.fill).slice(0, 3), look.alpha], paper);
          judge(`tile ${state} ${confidence} ${isFresh} ${isEnd}`, ratio(parts(look.text).slice(0, 3), fill));
        }
      }
    }
  }
  return weak;
})();
