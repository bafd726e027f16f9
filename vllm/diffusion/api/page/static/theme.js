// SPDX-License-Identifier: Apache-2.0
// The colours of the pages: the system's, light or dark. Pages load this file before they are drawn.
// The event `themechange` of the window reports a change.

const KEY = "mosaic-theme";
const SIGNS = { system: "◐", light: "☀\ufe0e", dark: "☾" };
const NAMES = Object.keys(SIGNS);
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const button = document.getElementById("theme");

let theme = NAMES[0];
try {
  theme = NAMES.find((name) => name === localStorage.getItem(KEY)) ?? theme;
} catch {
  // The browser refuses to store data.
}

function apply() {
  const isDark = theme === "dark" || (theme === "system" && prefersDark.matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  const title = `Theme: ${theme}`;
  Object.assign(button, { textContent: SIGNS[theme], title, ariaLabel: title });
  dispatchEvent(new Event("themechange"));
}

function choose(name) {
  theme = name;
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // The choice holds until the page is closed.
  }
  apply();
}

button.addEventListener("click", () => choose(NAMES[(NAMES.indexOf(theme) + 1) % NAMES.length]));
prefersDark.addEventListener("change", apply);
apply();
