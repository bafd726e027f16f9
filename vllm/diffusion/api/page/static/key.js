// SPDX-License-Identifier: Apache-2.0
// JSON of the server's; asks for a key as long as the server wants one.

import { headers, reasonOf, rememberKey } from "./request.js";

export async function jsonOf(path) {
  for (;;) {
    const response = await fetch(path, { headers: headers() });
    if (response.ok) return response.json();
    if (response.status !== 401) throw new Error(await reasonOf(response));
    await askForKey();
  }
}

function askForKey() {
  const dialog = document.getElementById("key");
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      rememberKey(dialog.querySelector("input").value.trim());
      resolve();
    }, { once: true });
  });
}
