// SPDX-License-Identifier: Apache-2.0
// Fetches JSON from the server, and asks the user for an API key if the server requires one.

import { apiKey, headers, reach, reasonOf, rememberKey } from "./request.js";

export async function jsonOf(path) {
  for (;;) {
    const response = await reach(path, { headers: headers() });
    if (response.ok) return response.json();
    if (response.status !== 401) throw new Error(await reasonOf(response));
    await askForKey();
  }
}

const FORM = `<form method="dialog">
  <h2 id="key-title"></h2>
  <label for="key-input">Key</label>
  <input id="key-input" type="password" autocomplete="off" required>
  <p>The key is stored only in this browser tab and is sent with every request.</p>
  <button class="main">Continue</button>
</form>`;

function askForKey() {
  const dialog = document.createElement("dialog");
  dialog.setAttribute("aria-labelledby", "key-title");
  dialog.innerHTML = FORM;
  dialog.querySelector("h2").textContent =
    apiKey() ? "The server does not accept this API key" : "This server requires an API key";
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      rememberKey(dialog.querySelector("input").value.trim());
      dialog.remove();
      resolve();
    }, { once: true });
  });
}
