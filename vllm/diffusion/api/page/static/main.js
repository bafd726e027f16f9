// SPDX-License-Identifier: Apache-2.0
// The page: a conversation, and one or two canvases next to it.

import { Conversation, isSaid } from "./conversation.js";
import { History } from "./history.js";
import { jsonOf } from "./key.js";
import { Log } from "./log.js";
import { Pane } from "./pane.js";
import { copy, linkOf, stateIn } from "./request.js";
import { Reviser } from "./reviser.js";
import { keep, kept } from "./session.js";
import { bindShortcuts, showShortcuts } from "./shortcuts.js";
import { openStore } from "./store.js";

const RETRY_MS = 2000;
const find = (id) => document.getElementById(id);
const announce = (text) => (find("status").textContent = text);

class Page {
  constructor(offered, store) {
    this.options = offered;
    this.store = store;
    this.conversation = new Conversation();
    this.edited = null; // number of the turn whose question is being edited
    this.draft = ""; // the text that was in the question's box before
    this.asked = null; // the turn that is being answered
    this.panes = [this.newPane("A")];
    this.reviser = new Reviser(find("revise"), offered.revises ?? [], (fields) => this.again(this.revised, fields));
    this.log = new Log(find("log"), {
      edit: (k) => this.edit(k), again: (k) => this.again(k), choose: (k, by) => this.choose(k, by),
      ...(offered.revises && { revise: (k) => this.revise(k) }),
    });
    this.history = new History(find("history"), store, {
      open: (conversation) => this.open(conversation),
      add: (conversation) => this.add(conversation),
      rename: (conversation, title) => this.rename(conversation, title),
      remove: (conversation) => this.remove(conversation),
    });
    find("model").textContent = offered.model;
    find("version").textContent = `${offered.family} · Mosaic ${offered.version}`;
    this.listen();
  }

  listen() {
    const on = (id, event, act) => find(id).addEventListener(event, act);
    on("ask", "submit", (e) => (e.preventDefault(), this.submit()));
    on("question", "keydown", (e) => this.key(e));
    on("question", "input", () => this.enable());
    on("system", "input", (e) => this.instruct(e.target.value));
    on("compare", "click", () => this.compare(this.panes.length < 2));
    on("clear", "click", () => this.clear());
    on("past", "click", () => this.showHistory());
    on("help", "click", () => showShortcuts(find("shortcuts")));
    on("link", "click", () => this.copyLink());
    on("leave", "click", () => this.leaveEdit());
    bindShortcuts({
      stop: () => (this.isRunning ? this.stop() : this.leaveEdit()), clear: () => this.clear(), history: () => this.showHistory(),
      help: () => showShortcuts(find("shortcuts")),
    });
    for (const example of document.querySelectorAll(".example")) {
      example.addEventListener("click", () => this.ask(0, example.textContent));
      example.disabled = false;
    }
    addEventListener("pagehide", () => this.keep());
  }

  newPane(name) {
    const root = find("pane").content.firstElementChild.cloneNode(true);
    find("stage").append(root);
    root.setAttribute("aria-label", `Canvas ${name}`);
    return new Pane(root, name, this.options, announce);
  }

  compare(isOn) {
    if (isOn === this.panes.length > 1) return;
    if (isOn) {
      const pane = this.newPane("B");
      pane.controls.set(this.panes[0].controls.chosen());
      pane.summarise();
      this.panes.push(pane);
    } else {
      const pane = this.panes.pop();
      pane.stop();
      pane.pause();
      pane.root.remove();
    }
    find("stage").dataset.panes = this.panes.length;
    find("compare").setAttribute("aria-pressed", isOn);
  }

  key(event) {
    const last = this.conversation.shown.length - 1;
    if (event.key === "ArrowUp" && !find("question").value && last >= 0) {
      event.preventDefault();
      this.edit(last);
    }
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.submit();
  }

  get isRunning() {
    return this.panes.some((pane) => pane.isRunning);
  }

  stop() {
    for (const pane of this.panes) pane.stop();
  }

  // ---- questions -------------------------------------------------------------------------------

  submit() {
    if (this.isRunning) return this.stop();
    const question = find("question").value.trim();
    if (!question) return;
    const k = this.edited ?? this.conversation.shown.length;
    this.write("");
    this.leaveEdit();
    this.ask(k, question);
  }

  // Ask turn k. If there is a turn k, the new one becomes a branch beside it. revision: fields of a
  // text to revise, which becomes the answer.
  async ask(k, question, revision = null) {
    if (this.isRunning) return;
    const { conversation } = this;
    const turn = this.asked = conversation.begin(k, question);
    this.show(k);
    this.save(conversation);
    this.setRunning(true);
    const isPlain = find("plain").checked;
    try {
      await Promise.all(this.panes.map(async (pane) => {
        const messages = conversation.messages(k, pane.name);
        const show = (answer) => {
          if (conversation === this.conversation) this.log.fill(k, pane.name, answer);
        };
        turn.answers[pane.name] = await pane.run(messages, isPlain, show, revision);
        show(turn.answers[pane.name]);
      }));
    } finally {
      if (this.asked === turn) this.setRunning(false);
      this.save(conversation);
    }
  }

  setRunning(isOn) {
    find("send").textContent = isOn ? "Stop" : "Send";
    find("ask").dataset.state = isOn ? "running" : "";
    find("log").setAttribute("aria-busy", isOn);
    this.enable();
    if (isOn) announce("Request sent.");
  }

  // Enable the button that sends if there is something to send or to stop.
  enable() {
    const isRunning = find("ask").dataset.state === "running";
    find("send").disabled = !isRunning && !find("question").value.trim();
  }

  // Ask the question of turn k again; revision: as for `ask`.
  again(k, revision) {
    if (this.isRunning) return;
    this.leaveEdit();
    this.ask(k, this.conversation.shown[k].question, revision);
    this.focus();
  }

  // Open the dialog that revises the first answer of turn k.
  revise(k) {
    if (this.isRunning) return;
    this.leaveEdit();
    this.revised = k;
    this.reviser.show(Object.values(this.conversation.shown[k].answers).find(isSaid)?.text ?? "");
  }

  edit(k) {
    if (this.isRunning) return;
    if (this.edited === null) this.draft = find("question").value;
    this.edited = k;
    this.write(this.conversation.shown[k].question);
    find("edited").textContent = `Editing question ${k + 1}`;
    find("editing").hidden = false;
    find("question").focus();
  }

  leaveEdit() {
    if (this.edited !== null) this.write(this.draft);
    this.edited = null;
    find("editing").hidden = true;
  }

  choose(k, by) {
    if (this.isRunning) return;
    this.leaveEdit();
    this.conversation.choose(k, by);
    this.show(k);
    this.log.turns[k].scrollIntoView({ block: "nearest" });
    this.save(this.conversation);
  }

  // Write into the question's box.
  write(text) {
    find("question").value = text;
    this.enable();
  }

  // Focus the question's box, except on phones, where this opens the keyboard.
  focus() {
    if (matchMedia("(min-width: 56rem)").matches) find("question").focus();
  }

  // ---- conversations ---------------------------------------------------------------------------

  // Set the system prompt of all later requests.
  instruct(text) {
    this.conversation.system = text;
    find("system-box").dataset.set = Boolean(text.trim());
    this.save(this.conversation);
  }

  // Begin a new conversation with the server's settings.
  clear() {
    this.begin(new Conversation());
    for (const pane of this.panes) pane.reset();
    this.keep();
    find("question").focus();
  }

  // Keep and open a conversation of a file.
  async add(conversation) {
    await this.save(conversation);
    this.open(conversation);
  }

  showHistory() {
    return this.history.show(this.conversation.id);
  }

  // Open a conversation of the history.
  open(conversation) {
    if (conversation.id === this.conversation.id) return;
    const isPlain = find("plain").checked;
    const open = conversation.dropUnanswered();
    this.begin(conversation, isPlain);
    if (open) this.write(open.question);
    this.keep();
    this.focus();
  }

  // Show a conversation in place of the one there is.
  begin(conversation, isPlain = false) {
    this.leaveEdit();
    for (const pane of this.panes) pane.clear();
    this.asked = null;
    this.setRunning(false);
    this.conversation = conversation;
    find("system").value = conversation.system;
    find("system-box").dataset.set = Boolean(conversation.system.trim());
    find("plain").checked = isPlain;
    this.show(0);
  }

  // Show the conversation; the first `same` turns are in the log already.
  show(same) {
    const { conversation } = this;
    find("welcome").hidden = conversation.turns.length > 0;
    this.log.show(conversation, same, this.panes.map((pane) => pane.name));
    find("log").dataset.names = this.panes.length > 1 ? "shown" : "";
    const last = this.log.turns.at(-1);
    last?.scrollIntoView({ block: "start" });
    last?.querySelector(".answer")?.scrollIntoView({ block: "nearest" }); // after a long question
  }

  rename(conversation, title) {
    const renamed = conversation.id === this.conversation.id ? this.conversation : conversation;
    renamed.title = title;
    return this.save(renamed);
  }

  // Delete a conversation, after a confirmation.
  remove(conversation) {
    find("sure-text").textContent = `Delete “${conversation.name}” with all its branches?`;
    const dialog = find("sure");
    dialog.onclose = async () => {
      if (dialog.returnValue !== "yes") return;
      await this.store.remove(conversation.id);
      if (conversation.id === this.conversation.id) {
        this.conversation.isRemoved = true;
        this.clear();
      }
      await this.showHistory();
    };
    dialog.returnValue = "";
    dialog.showModal();
  }

  // Store a conversation that has turns.
  async save(conversation) {
    this.keep();
    if (!conversation.turns.length || conversation.isRemoved) return;
    await this.store.put(conversation).catch((error) => {
      announce(`The browser cannot keep the conversation: ${error.message}`);
    });
    this.keep(); // The store may have given it a new id.
  }

  // ---- what a reload brings back, and the link that repeats a request --------------------------

  keep() {
    const { id, system } = this.conversation, { link } = this;
    const question = this.edited === null ? find("question").value : this.draft;
    const panes = this.panes.map((pane) => ({ settings: pane.controls.chosen() }));
    keep(sessionStorage, { id, system, question, plain: find("plain").checked, panes, link });
  }

  async copyLink() {
    const { shown, system } = this.conversation;
    const last = Math.max(0, shown.length - 1);
    const panes = this.panes.map((pane) => ({ settings: pane.used ?? pane.controls.settings() }));
    const link = linkOf(location.href, {
      system,
      plain: find("plain").checked,
      turns: shown.slice(0, last).map(({ question, answers }) => ({ question, answers })),
      question: shown[last]?.question ?? find("question").value,
      panes,
    });
    history.replaceState(null, "", link);
    this.link = location.hash;
    await copy(link).catch(() => {});
    announce("Link copied. It is also in the address bar.");
    find("link").textContent = "Copied";
    setTimeout(() => (find("link").textContent = "Copy link"), 1600);
  }

  // A link is used only once. Later turns are part of the conversation that the browser keeps.
  async restore() {
    const own = kept(sessionStorage), linked = stateIn(location.href);
    const isNew = linked !== null && own?.link !== location.hash;
    this.link = location.hash;
    try {
      if (isNew) this.take(linked, Conversation.read(linked));
      else if (own) this.take(own, new Conversation((await this.store.get(own.id)) ?? own));
      if (isNew) announce("Filled in from the link; Send repeats the request.");
    } catch {
      this.compare(false);
      this.clear();
      announce("The link cannot be read.");
    }
    this.focus();
  }

  take({ plain = false, question = "", panes = [] }, conversation) {
    const open = conversation.dropUnanswered();
    this.begin(conversation, plain);
    this.write(question || (open?.question ?? ""));
    this.compare(panes.length > 1);
    panes.slice(0, 2).forEach(({ settings }, k) => {
      this.panes[k].controls.set(settings);
      this.panes[k].summarise();
    });
  }
}

// Fetch the server's options; retry until the server answers.
async function offered() {
  const hello = find("hello").textContent;
  for (;;) {
    try {
      const found = await jsonOf("page/options.json");
      find("hello").textContent = hello;
      return found;
    } catch (error) {
      find("hello").textContent = error.message;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

const page = new Page(await offered(), await openStore());
await page.restore();
document.body.dataset.state = "ready";
