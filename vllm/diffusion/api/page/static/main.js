// SPDX-License-Identifier: Apache-2.0
// The page: a conversation, and one or two canvases next to it.

import { Conversation, keep, kept } from "./conversation.js";
import { jsonOf } from "./key.js";
import { Log } from "./log.js";
import { Pane } from "./pane.js";
import { copy, linkOf, stateIn } from "./request.js";

const RETRY_MS = 2000;
const find = (id) => document.getElementById(id);
const announce = (text) => (find("status").textContent = text);

class Page {
  constructor(offered) {
    this.options = offered;
    this.conversation = new Conversation();
    this.edited = null; // number of the turn whose question is being edited
    this.panes = [this.newPane("A")];
    this.log = new Log(find("log"), { edit: (k) => this.edit(k), again: (k) => this.again(k) });
    find("model").textContent = offered.model;
    find("version").textContent = `${offered.family} · Mosaic ${offered.version}`;
    this.listen();
    this.restore();
    for (const button of document.querySelectorAll("#send, .example")) button.disabled = false;
    if (matchMedia("(min-width: 56rem)").matches) find("question").focus(); // opens a keyboard on phones
  }

  listen() {
    const on = (id, event, act) => find(id).addEventListener(event, act);
    on("ask", "submit", (e) => (e.preventDefault(), this.submit()));
    on("question", "keydown", (e) => this.key(e));
    on("system", "input", (e) => this.instruct(e.target.value));
    on("compare", "click", () => this.compare(this.panes.length < 2));
    on("clear", "click", () => this.clear());
    on("link", "click", () => this.copyLink());
    on("leave", "click", () => this.leaveEdit());
    document.addEventListener("keydown", (e) => e.key === "Escape" && this.stop());
    for (const example of document.querySelectorAll(".example")) {
      example.addEventListener("click", () => this.ask(0, example.textContent));
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

  // ---- the conversation ------------------------------------------------------------------------

  submit() {
    if (this.isRunning) return this.stop();
    const question = find("question").value.trim();
    if (!question) return;
    const k = this.edited ?? this.conversation.turns.length;
    return this.replacing(k, () => {
      find("question").value = "";
      this.leaveEdit();
      this.ask(k, question);
    });
  }

  // Set the system prompt of all later requests.
  instruct(text) {
    this.conversation.system = text;
    find("system-box").dataset.set = Boolean(text.trim());
  }

  // Ask turn k, which replaces turn k and all later turns.
  async ask(k, question) {
    if (this.isRunning) return;
    const turn = this.conversation.begin(k, question);
    this.show(k);
    this.keep();
    this.setRunning(true);
    const isPlain = find("plain").checked;
    try {
      await Promise.all(this.panes.map(async (pane) => {
        const messages = this.conversation.messages(k, pane.name);
        const show = (answer) => this.log.fill(k, pane.name, answer);
        turn.answers[pane.name] = await pane.run(messages, isPlain, show);
        show(turn.answers[pane.name]);
      }));
    } finally {
      this.setRunning(false);
      this.keep();
    }
  }

  // Run `act`, which replaces turn k. If later turns would be removed, ask for confirmation first.
  replacing(k, act) {
    const count = this.conversation.turns.length - k - 1;
    if (count < 1) return act();
    find("sure-text").textContent = `Asking question ${k + 1} again removes ` +
      (count === 1 ? "the turn after it." : `the ${count} turns after it.`);
    const dialog = find("sure");
    dialog.onclose = () => dialog.returnValue === "yes" && act();
    dialog.returnValue = "";
    dialog.showModal();
  }

  // Show the conversation; the first `same` turns are in the log already.
  show(same) {
    const { turns } = this.conversation;
    find("welcome").hidden = turns.length > 0;
    this.log.show(turns, same, this.panes.map((pane) => pane.name));
    find("log").dataset.names = this.panes.length > 1 ? "shown" : "";
    this.log.turns.at(-1)?.scrollIntoView({ block: "start" });
  }

  setRunning(isOn) {
    find("send").textContent = isOn ? "Stop" : "Send";
    find("ask").dataset.state = isOn ? "running" : "";
    find("log").setAttribute("aria-busy", isOn);
    if (isOn) announce("Request sent.");
  }

  again(k) {
    if (this.isRunning) return;
    this.replacing(k, () => {
      this.leaveEdit();
      this.ask(k, this.conversation.turns[k].question);
    });
  }

  edit(k) {
    if (this.isRunning) return;
    this.edited = k;
    find("question").value = this.conversation.turns[k].question;
    find("edited").textContent = `Editing question ${k + 1}`;
    find("editing").hidden = false;
    find("question").focus();
  }

  leaveEdit() {
    if (this.edited !== null) find("question").value = "";
    this.edited = null;
    find("editing").hidden = true;
  }

  clear() {
    this.stop();
    this.leaveEdit();
    this.begin(new Conversation());
    for (const pane of this.panes) pane.reset();
    this.keep();
    find("question").focus();
  }

  // Show a conversation in place of the one there is.
  begin(conversation, isPlain = false) {
    this.conversation = conversation;
    this.instruct(conversation.system);
    find("system").value = conversation.system;
    find("plain").checked = isPlain;
    this.show(0);
  }

  // ---- what a reload brings back, and the link that repeats a request --------------------------

  state(numTurns) {
    return {
      system: this.conversation.system,
      plain: find("plain").checked,
      turns: this.conversation.turns.slice(0, numTurns),
    };
  }

  keep() {
    const panes = this.panes.map((pane) => ({ settings: pane.controls.chosen() }));
    keep(sessionStorage, { ...this.state(), panes, link: this.link });
  }

  async copyLink() {
    const { turns } = this.conversation;
    const last = Math.max(0, turns.length - 1);
    const panes = this.panes.map((pane) => ({ settings: pane.used ?? pane.controls.settings() }));
    const question = turns[last]?.question ?? find("question").value;
    const link = linkOf(location.href, { ...this.state(last), question, panes });
    history.replaceState(null, "", link);
    this.link = location.hash;
    await copy(link).catch(() => {});
    announce("Link copied. It is also in the address bar.");
    find("link").textContent = "Copied";
    setTimeout(() => (find("link").textContent = "Copy link"), 1600);
  }

  // A link is used only once. Later turns are part of the state that the tab keeps.
  restore() {
    const own = kept(sessionStorage), linked = stateIn(location.href);
    const isNew = linked !== null && own?.link !== location.hash;
    const found = isNew ? linked : own;
    if (!found) return;
    this.link = location.hash;
    try {
      this.take(found, isNew);
    } catch {
      this.compare(false);
      this.clear();
      announce("The link cannot be read.");
    }
  }

  take(found, isNew) {
    const { system = "", turns = [], plain = false, question = "", panes = [] } = found;
    const open = turns.at(-1);
    // The page may have been closed before the answer was complete.
    if (open && !Object.keys(open.answers).length) turns.pop();
    this.begin(new Conversation({ system: String(system), turns }), plain);
    find("question").value = question || (open === turns.at(-1) ? "" : open.question);
    this.compare(panes.length > 1);
    panes.slice(0, 2).forEach(({ settings }, k) => {
      this.panes[k].controls.set(settings);
      this.panes[k].summarise();
    });
    if (isNew) announce("Filled in from the link; Send repeats the request.");
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

new Page(await offered());
