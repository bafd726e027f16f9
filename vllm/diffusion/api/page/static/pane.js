// SPDX-License-Identifier: Apache-2.0
// One canvas with its controls, counters and timeline.

import { BoardView, inks } from "./board.js";
import { Controls, onPage } from "./controls.js";
import { saveFile } from "./files.js";
import { KINDS, matches } from "./guided.js";
import { apiKey, ask, bodyOf, copy, curlOf, lengthOf, revising } from "./request.js";
import { svgOf } from "./svg.js";
import { ABSENT, EDITED, MASKED, PROPOSED, Trace, UNUSED } from "./trace.js";

const STEP_MS = 350; // maximum time between two steps of a replay
const REPLAY_MS = 4500; // maximum time of a replay
const SHORT_MS = 1000; // shorter runs are replayed, because they are too fast to watch

export class Pane {
  // root: a copy of the template in the page.
  constructor(root, name, options, announce) {
    this.root = root;
    this.name = name;
    this.announce = announce;
    this.options = options;
    this.part = (part) => root.querySelector(`[data-part="${part}"]`);
    this.controls = new Controls(this.part("controls"), options, () => this.summarise());
    this.board = new BoardView(this.part("scroller"), (i) => this.read(i));
    this.trace = null;
    this.part("name").textContent = name;
    this.listen();
    this.summarise();
    this.enable();
  }

  // Enable the buttons that can be used now.
  enable() {
    const hasFrames = Boolean(this.trace?.frames.length);
    for (const name of ["play", "svg", "density", "slider"]) this.part(name).disabled = !hasFrames;
    this.part("curl").disabled = !this.body;
  }

  listen() {
    const on = (part, act) => this.part(part).addEventListener("click", act);
    this.part("slider").addEventListener("input", (e) => this.go(e.target.valueAsNumber - 1));
    on("play", () => (this.player ? this.pause() : this.play()));
    on("density", () => this.changeDensity());
    on("svg", () => this.save());
    on("curl", () => this.copyCurl());
    addEventListener("themechange", () => this.drawTimeline());
  }

  summarise() {
    const { model, algorithm, gen_length, steps } = this.controls.settings();
    const adapter = model !== this.options.model && model;
    const kind = KINDS[this.controls.kind]?.name;
    this.part("summary").textContent =
      [adapter, algorithm, gen_length ? `${gen_length} tokens` : "length auto", steps && `${steps} steps`, kind].filter(Boolean).join(" · ");
  }

  // Send a request and draw every step. Returns the answer in the form of conversations and logs;
  // `show` is called with each partial answer. revision: fields of a text to revise, or null.
  async run(messages, isPlain, show, revision) {
    let text = "", note = "", isBad = false, report = null, settings = null;
    let { abort } = this;
    this.report = null;
    try {
      if (this.controls.problem) {
        this.root.querySelector("details").open = true; // shows the control with the error
        throw new Error(this.controls.problem);
      }
      settings = this.controls.settings();
      settings.seed ??= Math.floor(Math.random() * 2 ** 32);
      const { autoLength } = this.controls;
      const length = lengthOf(settings, messages, autoLength, this.options.max_model_len);
      if (revision) settings = revising(settings);
      abort = this.begin(settings, bodyOf(messages, { ...settings, ...(revision ?? length) }, isPlain));
      await ask(this.body, (event) => {
        if (event.object === "text_diffusion.canvas") return this.draw(event.canvas);
        text = Array.isArray(event.text) ? event.text[0] : event.text;
        show({ text, isExact: Boolean(settings.structured_outputs), isOver: false });
        if (event.diffusion) this.report = report = event;
      }, abort.signal);
    } catch (error) {
      isBad = error.name !== "AbortError";
      note = isBad ? onPage(error.message) : "Stopped.";
      if (abort === this.abort) this.say(note, isBad);
    } finally {
      if (abort === this.abort && this.isRunning) this.finish();
    }
    if (note === "Stopped.") note = "Stopped. This turn is not sent to the model with later questions.";
    const language = settings?.structured_outputs, isWhole = report !== null;
    if (isWhole && !text.trim()) note = emptiness(report);
    const verdict = isWhole && language ? verdictOn(language, text) : null;
    const speed = isWhole ? speedOf(report) : null;
    const diff = report?.diffusion.diff?.[0] ?? "";
    return { text, diff, isWhole, isExact: Boolean(language), isBad, note, verdict, speed };
  }

  say(note, isBad) {
    Object.assign(this.part("error"), { textContent: note, hidden: false });
    this.part("error").dataset.bad = isBad;
  }

  // Show an empty canvas for a request. Returns what stops the request.
  begin(settings, body) {
    this.pause();
    const length = settings.gen_length ?? this.controls.autoLength.first;
    const trace = new Trace(length, this.options.end_ids);
    this.body = body;
    this.used = settings;
    this.abort = new AbortController();
    this.started = performance.now();
    this.trace = trace;
    this.board.show(this.trace, blockLengthOf(settings));
    this.part("error").hidden = true;
    this.root.dataset.state = "running";
    this.count();
    this.drawTimeline();
    this.enable();
    this.ticking = setInterval(() => this.count(), 200);
    return this.abort;
  }

  draw(canvas) {
    if (canvas.token_ids.length !== this.trace.length) this.resize(canvas.token_ids.length);
    this.trace.push(canvas, (performance.now() - this.started) / 1000);
    this.board.redraw();
    this.board.follow();
    this.count();
    if (this.trace.frames.length === 1) this.enable();
    this.drawTimelineSoon();
  }

  // Draw the timeline at most once per screen frame.
  drawTimelineSoon() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = null;
      this.drawTimeline();
    });
  }

  resize(length) {
    if (this.trace.frames.length && length > this.trace.length) {
      this.trace.grow(length);
      this.board.arrange();
      this.put("readout", `The canvas has grown to ${length} tokens.`);
    } else {
      this.trace = new Trace(length, this.options.end_ids);
      this.board.show(this.trace, blockLengthOf(this.used));
    }
  }

  finish() {
    clearInterval(this.ticking);
    this.root.dataset.state = this.trace.frames.length ? "done" : "empty";
    if (this.report) this.trace.settle();
    this.board.redraw();
    this.count();
    this.drawTimeline();
    this.enable();
    this.announce(this.describe());
    const isShort = this.report?.diffusion.denoise_ms < SHORT_MS && this.trace.frames.length > 1;
    if (isShort && !matchMedia("(prefers-reduced-motion: reduce)").matches) this.play();
  }

  stop() {
    this.abort?.abort();
  }

  get isRunning() {
    return this.root.dataset.state === "running";
  }

  // Restore the empty canvas and the server's settings.
  reset() {
    this.clear();
    this.controls.reset();
    this.summarise();
  }

  // Restore the empty canvas; a running request is stopped and no longer shown.
  clear() {
    this.stop();
    this.pause();
    clearInterval(this.ticking);
    this.abort = null;
    this.trace = this.body = this.used = this.report = null;
    this.put("readout", "");
    this.root.dataset.state = "empty";
    this.part("error").hidden = true;
    for (const part of ["step", "forwards", "committed", "rate", "seconds", "left"]) this.put(part, "–");
    this.drawTimeline();
    this.enable();
  }

  describe() {
    const { trace } = this;
    if (!trace?.frames.length) return `${this.name}: no answer.`;
    const { step, committed, length } = trace.shown;
    return `${this.name}: step ${step}, ${committed} of ${length} tokens committed.`;
  }

  // ---- counters ------------------------------------------------------------------------------

  count() {
    const { trace, report, used } = this;
    const newest = trace.frames.at(-1);
    const { shown } = trace;
    const seconds = report ? report.diffusion.denoise_ms / 1000
      : newest?.seconds ?? (performance.now() - this.started) / 1000;
    const of = used.steps ? `/${used.steps}` : "";
    this.put("step", `${shown.step}${of}`);
    this.put("forwards", report?.diffusion.num_forwards ?? newest?.step ?? 0);
    this.part("guessed").hidden = !trace.hasGuesses;
    this.put("committed", `${shown.committed}/${shown.length}`);
    const answered = report ? report.token_ids[0].length : trace.counted().numOthers;
    this.put("rate", newest ? rounded(answered / seconds) : "–");
    this.put("seconds", `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`);
    const left = this.isRunning && newest?.committed
      ? (seconds / newest.committed) * (trace.length - newest.committed) : null;
    this.put("left", left === null ? peakOf(report) : `${left.toFixed(1)} s`);
    this.part("left-name").textContent = left === null ? "memory" : "time left";
    const slider = this.part("slider");
    slider.max = trace.frames.length;
    slider.value = trace.at + 1;
    slider.setAttribute("aria-valuetext", `step ${shown.step}`);
  }

  put(part, value) {
    this.part(part).textContent = value;
  }

  // ---- replay --------------------------------------------------------------------------------

  go(index) {
    if (!this.trace) return;
    this.trace.seek(index);
    this.redraw();
    this.announce(this.describe());
  }

  redraw() {
    this.board.redraw();
    this.count();
    this.drawTimeline();
  }

  play() {
    if (!this.trace?.frames.length) return;
    const { length } = this.trace.frames;
    if (this.trace.at >= length - 1) this.trace.seek(-1);
    this.redraw();
    const stride = Math.max(1, Math.round((length * 16) / REPLAY_MS));
    const pause = Math.max(16, Math.min(STEP_MS, REPLAY_MS / length));
    this.setPlaying(setInterval(() => {
      this.trace.seek(this.trace.at + stride);
      this.board.follow();
      this.redraw();
      if (this.trace.at >= length - 1) this.pause();
    }, pause));
  }

  pause() {
    clearInterval(this.player);
    this.setPlaying(0);
  }

  setPlaying(player) {
    this.player = player;
    const button = this.part("play");
    button.textContent = player ? "Pause" : "Replay";
    button.setAttribute("aria-pressed", Boolean(player));
  }

  // Draw bars above the slider: the number of tokens that each step committed.
  drawTimeline() {
    const canvas = this.part("timeline"), ink = inks(canvas), ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const commits = this.trace?.commits() ?? [], most = Math.max(1, ...commits);
    const each = width / commits.length;
    commits.forEach((count, k) => {
      context.fillStyle = k <= this.trace.at ? ink.accent : ink.faint;
      const h = Math.max(1, (count / most) * height);
      context.fillRect(k * each, height - h, Math.max(1, each - (each > 4 ? 1 : 0)), h);
    });
  }

  // ---- one position --------------------------------------------------------------------------

  read(i) {
    this.part("readout").textContent = i < 0 ? "" : this.describePosition(i);
  }

  describePosition(i) {
    const { trace } = this, state = trace.view.state[i], block = blockLengthOf(this.used);
    const where = `position ${i + 1}${block ? `, block ${Math.floor(i / block) + 1}` : ""}`;
    if (state === MASKED) return `${where}: masked`;
    if (state === ABSENT) return `${where}: not part of the canvas yet`;
    if (state === UNUSED) return `${where}: not needed, because the answer ended before it`;
    const what = state === PROPOSED ? "proposed" : trace.isFresh(i) ? "just committed"
      : state === EDITED ? "edited" : "committed";
    const how = trace.view.guessed[i] ? " by an accepted draft" : "";
    const p = trace.view.confidence[i];
    return `${where}: ${JSON.stringify(trace.textAt(i))} ${what}${how}, confidence ${p.toFixed(3)}`;
  }

  // ---- export and density --------------------------------------------------------------------

  changeDensity() {
    this.board.isMap = !this.board.showsMap;
    this.part("density").setAttribute("aria-pressed", this.board.isMap);
    this.board.arrange();
  }

  save() {
    if (!this.trace?.frames.length) return;
    const title = `${this.used.algorithm}: ${this.trace.length} tokens in ` +
      `${this.trace.frames.at(-1).step} steps`;
    const text = svgOf(this.trace, blockLengthOf(this.used), inks(this.root), title);
    saveFile(`mosaic-${this.used.algorithm}.svg`, text, "image/svg+xml");
  }

  async copyCurl() {
    if (!this.body) return;
    const origin = new URL(".", location.href).href;
    await copy(curlOf(origin, this.body, Boolean(apiKey())));
    this.announce("curl command copied");
  }
}

// The block length of the request, or 0 for adablock, where the model decides where blocks end.
function blockLengthOf(settings) {
  return settings.algorithm === "adablock" ? 0 : settings.block_length ?? 0;
}

// Whether an answer matches the requested format: [is match, description], or null if unknown.
function verdictOn(language, text) {
  const isMatch = matches(language, text);
  if (isMatch === null) return null;
  const { name } = KINDS[Object.keys(language)[0]];
  return [isMatch, `${isMatch ? "matches" : "does not match"}: ${name}`];
}

// The reason why an answer has no text.
function emptiness({ diffusion, usage }) {
  const numEnds = diffusion.num_end_tokens;
  const count = numEnds || usage.completion_tokens, kind = numEnds ? "end token" : "token without text";
  return `empty answer: ${count} ${count === 1 ? kind : kind.replace("token", "tokens")}`;
}

const speedOf = ({ diffusion, token_ids }) => ({
  tokens: token_ids[0].length, seconds: diffusion.denoise_ms / 1000, steps: diffusion.num_steps,
});

const rounded = (value) => (value >= 100 ? Math.round(value) : value.toFixed(1));

function peakOf(report) {
  const bytes = report?.diffusion.peak_bytes;
  if (!bytes) return "–";
  return bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}
