// SPDX-License-Identifier: Apache-2.0
// What a tab keeps for a reload: which conversation it shows, and its settings.

const KEY = "mosaic-session";

export function keep(storage, state) {
  try {
    storage.setItem(KEY, JSON.stringify(state));
  } catch {
    // The browser refuses to store data: a reload begins with a new conversation.
  }
}

export function kept(storage) {
  try {
    const found = JSON.parse(storage.getItem(KEY));
    return Array.isArray(found?.panes) ? found : null;
  } catch {
    return null;
  }
}
