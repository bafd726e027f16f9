// SPDX-License-Identifier: Apache-2.0
// The page: a conversation on the left, one canvas or two on the right.

import { jsonOf } from "./key.js";
import { Pane } from "./pane.js";
import { linkOf, stateIn } from "./request.js";

const find = (id) => document.getElementById(id);
const announce = (text) => (find("status").textContent = text);

class Page {
  constructor(offered) {
    this.options = offered;
    this.panes = [this.newPane("A")];
    find("model").textContent = offered.model;
    find("version").textContent = `${offered.family} · Mosaic ${offered.version}`;
    find("ask").addEventListener("submit", (e) => (e.preventDefault(), this.submit()));
    find("question").addEventListener("keydown", (e) => this.key(e));
    find("compare").addEventListener("click", () => this.compare(this.panes.length < 2));
    find("clear").addEventListener("click", () => this.clear());
    find("link").addEventListener("click", () => this.copyLink());
    document.addEventListener("keydown", (e) => e.key === "Escape" && this.stop());
    this.restore(stateIn(location.href));
    find("send").disabled = false;
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
      pane.controls.set(this.panes[0].controls.settings());
      pane.messages = [...this.panes[0].messages];
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

  async submit() {
    if (this.isRunning) return this.stop();
    const question = find("question").value.trim();
    if (!question) return;
    find("question").value = "";
    this.asked = question;
    this.before = this.panes.map((pane) => pane.messages);
    const answers = this.say(question);
    this.setRunning(true);
    const isPlain = find("plain").checked;
    await Promise.all(this.panes.map(async (pane, k) => {
      const text = await pane.run(question, isPlain, (found) => (answers[k].textContent = found));
      answers[k].classList.remove("open");
      if (text === null) answers[k].textContent = pane.part("error").textContent;
      this.judge(answers[k], pane.verdict(text));
    }));
    this.setRunning(false);
  }

  setRunning(isOn) {
    find("send").textContent = isOn ? "Stop" : "Send";
    find("ask").dataset.state = isOn ? "running" : "";
    if (isOn) announce("Asked.");
  }

  stop() {
    for (const pane of this.panes) pane.stop();
  }

  // Puts a question into the conversation; returns an element for each answer.
  say(question) {
    find("welcome").hidden = true;
    const turn = document.createElement("div");
    turn.className = "turn";
    turn.append(Object.assign(document.createElement("p"), { className: "mine", textContent: question }));
    const answers = this.panes.map((pane) => {
      const row = document.createElement("div");
      row.className = "answer";
      if (this.panes.length > 1) row.dataset.name = pane.name;
      const text = document.createElement("p");
      text.className = "open";
      row.append(text);
      turn.append(row);
      return text;
    });
    find("log").append(turn);
    turn.scrollIntoView({ block: "end" });
    return answers;
  }

  // Says beside an answer whether it is what it had to be.
  judge(answer, verdict) {
    if (verdict === null) return;
    const [isMatch, text] = verdict;
    const mark = Object.assign(document.createElement("span"), { className: "verdict", textContent: text });
    mark.dataset.match = isMatch;
    answer.after(mark);
  }

  clear() {
    this.stop();
    for (const pane of this.panes) pane.messages = [];
    find("log").querySelectorAll(".turn").forEach((turn) => turn.remove());
    find("welcome").hidden = false;
    find("question").focus();
  }

  // ---- the link that repeats a request ---------------------------------------------------------

  async copyLink() {
    const state = {
      question: this.asked ?? find("question").value,
      plain: find("plain").checked,
      panes: this.panes.map((pane, k) => ({
        settings: pane.used ?? pane.controls.settings(),
        messages: this.before?.[k] ?? [],
      })),
    };
    const link = linkOf(location.href, state);
    history.replaceState(null, "", link);
    await navigator.clipboard?.writeText(link).catch(() => {});
    announce("Link copied; it is in the address, too.");
    find("link").textContent = "Copied";
    setTimeout(() => (find("link").textContent = "Copy link"), 1600);
  }

  restore(state) {
    if (!state) return;
    find("question").value = state.question;
    find("plain").checked = state.plain;
    this.compare(state.panes.length > 1);
    state.panes.slice(0, 2).forEach((saved, k) => {
      this.panes[k].controls.set(saved.settings);
      this.panes[k].messages = saved.messages;
      this.panes[k].summarise();
    });
    announce("Filled in from the link; Send repeats the request.");
  }
}

try {
  new Page(await jsonOf("page/options.json"));
} catch (error) {
  find("welcome").textContent = `The server did not answer: ${error.message}`;
}
