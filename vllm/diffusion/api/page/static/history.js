// SPDX-License-Identifier: Apache-2.0
// The list of earlier conversations: open, rename, save as a file, delete.

import { Conversation } from "./conversation.js";
import { button, element } from "./elements.js";
import { fileNameOf, jsonOf, markdownOf, saveFile } from "./files.js";

export class History {
  // dialog: the element of the list. acts: {open, add, rename, remove}, called with a conversation.
  constructor(dialog, store, acts) {
    this.dialog = dialog;
    this.store = store;
    this.acts = acts;
    this.list = dialog.querySelector("ul");
    dialog.querySelector(".close").addEventListener("click", () => dialog.close());
    const files = dialog.querySelector("[type=file]");
    dialog.querySelector(".load").addEventListener("click", () => files.click());
    files.addEventListener("change", () => this.load(files));
  }

  // Show the list; current: id of the conversation that the page shows.
  async show(current) {
    this.current = current;
    await this.draw();
    if (!this.dialog.open) this.dialog.showModal();
    this.focus(current);
  }

  // Focus a conversation, or the first one.
  focus(id) {
    const items = [...this.list.querySelectorAll(".past")];
    const item = items.find((one) => one.dataset.id === id) ?? items[0];
    (item?.querySelector(".open") ?? this.dialog.querySelector(".close")).focus();
  }

  async draw() {
    const all = (await this.store.all()).map((record) => new Conversation(record));
    this.dialog.querySelector(".none").hidden = all.length > 0;
    this.dialog.querySelector(".kept").textContent = this.store.isKept
      ? "Conversations are kept in this browser and sent nowhere."
      : "This browser does not allow the page to keep conversations. They end with the tab.";
    this.list.replaceChildren(...all.map((conversation) => this.itemOf(conversation)));
  }

  itemOf(conversation) {
    const item = element("li", "past");
    item.dataset.id = conversation.id;
    const open = button("", "", () => this.open(conversation));
    open.className = "open";
    open.append(element("span", "", conversation.name), timeOf(conversation.changed));
    if (conversation.id === this.current) open.setAttribute("aria-current", "true");
    const acts = this.actsOf(conversation, item);
    const more = button("More", `More for ${conversation.name}`, () => {
      acts.hidden = !acts.hidden;
      more.setAttribute("aria-expanded", !acts.hidden);
    });
    more.setAttribute("aria-expanded", false);
    item.append(open, more, acts);
    return item;
  }

  actsOf(conversation, item) {
    const acts = element("div", "acts");
    acts.hidden = true;
    const save = (suffix, text, type) => saveFile(fileNameOf(conversation.name, suffix), text, type);
    const { name } = conversation;
    acts.append(
      button("Rename", `Rename ${name}`, () => this.rename(conversation, item)),
      button("Save JSON", `Save JSON of ${name}, with all branches`, () =>
        save("json", jsonOf(conversation), "application/json")),
      button("Save Markdown", `Save Markdown of ${name}`, () =>
        save("md", markdownOf(conversation), "text/markdown")),
      button("Delete", `Delete ${name}`, () => this.acts.remove(conversation)),
    );
    return acts;
  }

  // Open the conversation in a file that *Save JSON* has written.
  async load(files) {
    const fault = this.dialog.querySelector(".error");
    try {
      const conversation = Conversation.read(JSON.parse(await files.files[0].text()));
      if (!conversation.turns.length) throw new Error("no turns");
      fault.hidden = true;
      this.dialog.close();
      await this.acts.add(conversation);
    } catch (error) {
      fault.textContent = `This file holds no conversation: ${error.message}`;
      fault.hidden = false;
    }
    files.value = "";
  }

  open(conversation) {
    this.dialog.close();
    this.acts.open(conversation);
  }

  // Replace the title by an input; Enter and leaving it rename, Escape restores the title.
  rename(conversation, item) {
    const input = element("input", "title");
    Object.assign(input, { value: conversation.name, ariaLabel: "Title" });
    const end = async (isNew) => {
      input.onblur = null;
      const title = input.value.trim();
      if (isNew && title && title !== conversation.name) await this.acts.rename(conversation, title);
      await this.draw();
      this.focus(conversation.id);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault(); // Escape would close the list.
      end(event.key === "Enter");
    });
    input.onblur = () => end(true);
    item.querySelector(".open").replaceWith(input);
    input.select();
  }
}

function timeOf(changed) {
  const date = new Date(changed);
  const isToday = date.toDateString() === new Date().toDateString();
  const style = isToday ? { timeStyle: "short" } : { dateStyle: "medium" };
  return Object.assign(element("time", "", date.toLocaleString("en-GB", style)), {
    dateTime: date.toISOString(),
  });
}
