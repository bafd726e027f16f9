// SPDX-License-Identifier: Apache-2.0
// Keeps conversations in the browser's IndexedDB. Nothing is sent to the server.

import { newId } from "./conversation.js";

const DATABASE = "mosaic", TABLE = "conversations";

// Open the store. A browser that refuses to store data gets one that keeps nothing.
export async function openStore() {
  try {
    const opening = indexedDB.open(DATABASE, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(TABLE, { keyPath: "id" });
    return new Store(await resultOf(opening));
  } catch {
    return new Store(null);
  }
}

class Store {
  constructor(database) {
    this.database = database;
  }

  get isKept() {
    return this.database !== null;
  }

  // All records, the newest one first.
  async all() {
    const found = this.isKept ? await resultOf(this.table("readonly").getAll()) : [];
    return found.sort((a, b) => b.changed - a.changed);
  }

  async get(id) {
    return this.isKept && id ? resultOf(this.table("readonly").get(id)) : undefined;
  }

  // Store a conversation. If another tab has stored it meanwhile, both versions are kept: this one
  // gets a new id.
  async put(conversation) {
    if (!this.isKept) return;
    const table = this.table("readwrite");
    const stored = await resultOf(table.get(conversation.id));
    if (stored && stored.revision !== conversation.revision) conversation.id = newId();
    conversation.revision++;
    await resultOf(table.put(conversation.record));
  }

  async remove(id) {
    if (this.isKept) await resultOf(this.table("readwrite").delete(id));
  }

  table(mode) {
    return this.database.transaction(TABLE, mode).objectStore(TABLE);
  }
}

function resultOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
