// SPDX-License-Identifier: Apache-2.0
// Tests the page's logic without a browser; tests/server/test_page.py runs it with `node --test`.

import assert from "node:assert/strict";
import { test } from "node:test";

const modules = new URL("../../vllm/diffusion/api/page/static/", import.meta.url);
const { ABSENT, COMMITTED, EDITED, MASKED, PROPOSED, Trace, UNUSED, shown } = await import(`${modules}trace.js`);
const { inCharacters, locked, moved, partsOf } = await import(`${modules}ranges.js`);
const { curlOf, eachEvent, lengthOf, linkOf, revising, stateIn } = await import(`${modules}request.js`);
const { languageOf, matches, writtenOf } = await import(`${modules}guided.js`);
const { bucketsOf, samplesOf, sumOf } = await import(`${modules}metrics.js`);
const { layout } = await import(`${modules}board.js`);
const { Conversation } = await import(`${modules}conversation.js`);
const { fileNameOf, jsonOf, markdownOf } = await import(`${modules}files.js`);
const { keep, kept } = await import(`${modules}session.js`);
const { faultOf, onPage } = await import(`${modules}controls.js`);
const { svgOf } = await import(`${modules}svg.js`);

const TEXT = { 1: "a", 2: " b", 3: "c&<", 9: "<|mask|>" };

// A canvas of cells "id[p|c]confidence"; "." is masked.
function canvas(step, ...cells) {
  const parts = cells.map((cell) => /^(?:(\d)([pc])([\d.]+)|\.)$/.exec(cell));
  const ids = parts.map((p) => (p[1] ? Number(p[1]) : 9));
  return {
    step, token_ids: ids, text: ids.map((id) => TEXT[id]),
    committed: parts.map((p) => p[2] === "c"), confidence: parts.map((p) => (p[3] ? Number(p[3]) : null)),
  };
}

function traced() {
  const trace = new Trace(3);
  trace.push(canvas(1, "1c0.5", "2p0.25", "."), 0.1);
  trace.push(canvas(2, "1c0.5", "3c0.75", "2p0.5"), 0.2);
  trace.push(canvas(4, "2c0.5", "3c0.75", "2c1"), 0.3);
  return trace;
}

test("every step can be shown again, forwards and backwards", () => {
  const trace = traced();
  const seen = [[MASKED, MASKED, MASKED], [COMMITTED, PROPOSED, MASKED],
    [COMMITTED, COMMITTED, PROPOSED], [EDITED, COMMITTED, COMMITTED]];
  for (const at of [2, 0, 1, -1, 2, -1, 0]) {
    trace.seek(at);
    assert.deepEqual([...trace.view.state], seen[at + 1]);
  }
  assert.equal(trace.textAt(1), " b");
  assert.equal(trace.view.confidence[1], 0.25);
});

test("what a step committed is fresh in that step alone", () => {
  const trace = traced();
  const fresh = [-1, 0, 1, 2].map((at) => {
    trace.seek(at);
    return [0, 1, 2].filter((i) => trace.isFresh(i));
  });
  assert.deepEqual(fresh, [[], [0], [1], [0, 2]]);
  assert.deepEqual(trace.commits(), [1, 1, 1]);
});

test("what a guess has committed is told apart", () => {
  const trace = new Trace(3);
  trace.push(canvas(1, "1c0.5", ".", "."), 0.1);
  assert.equal(trace.hasGuesses, false);
  trace.push({ ...canvas(3, "1c0.5", "2c0.5", "2c1"), guessed: [false, false, true] }, 0.2);
  assert.deepEqual([...trace.view.guessed], [0, 0, 1]);
  trace.seek(0);
  assert.deepEqual([...trace.view.guessed], [0, 0, 0]);
  assert.equal(trace.hasGuesses, true);
});

test("a canvas that grows keeps its earlier steps", () => {
  const trace = traced();
  trace.grow(5);
  trace.push(canvas(5, "2c0.5", "3c0.75", "2c1", "1c0.5", "2p0.5"), 0.4);
  assert.deepEqual([...trace.view.state], [EDITED, COMMITTED, COMMITTED, COMMITTED, PROPOSED]);
  trace.seek(1);
  assert.deepEqual([...trace.view.state], [COMMITTED, COMMITTED, PROPOSED, ABSENT, ABSENT]);
  assert.deepEqual(trace.commits(), [1, 1, 1, 1]);
  assert.deepEqual(trace.frames.map((frame) => frame.length), [3, 3, 3, 5]);
  assert.equal(trace.shown, trace.frames[1]);
  trace.seek(-1);
  assert.deepEqual(trace.shown, { step: 0, length: 3, committed: 0 });
});

test("a reader of an old step is not moved by a new one", () => {
  const trace = traced();
  trace.seek(0);
  trace.push(canvas(5, "1c0.5", "3c0.75", "2c1"), 0.4);
  assert.equal(trace.at, 0);
  assert.deepEqual([...trace.view.state], [COMMITTED, PROPOSED, MASKED]);
});

test("rows hold whole blocks, or blocks whole rows", () => {
  for (const [length, block, width] of [[256, 32, 1000], [256, 4, 1000], [96, 32, 380], [10, 7, 500]]) {
    const plan = layout(length, block, width, false);
    const [x, y] = plan.place(plan.columns - 1);
    assert.ok(x + plan.cell.width <= width, `${length} ${block} ${width}`);
    if (plan.tidy) assert.ok(plan.columns % block === 0 || block % plan.columns === 0);
    assert.ok(plan.place(length - 1)[1] < plan.height && y >= 0);
  }
});

test("events are heard whole, whatever parts they come in", () => {
  const text = 'data: {"a":1}\n\ndata: {"a":2}\n\ndata: [DONE]\n\n';
  for (let cut = 0; cut < text.length; cut++) {
    const heard = [];
    const rest = eachEvent(text.slice(0, cut), (e) => heard.push(e.a));
    assert.equal(eachEvent(rest + text.slice(cut), (e) => heard.push(e.a)), "");
    assert.deepEqual(heard, [1, 2]);
  }
});

test("without a length the canvas may grow as far as the model allows", () => {
  const auto = { canvas: "grow", first: 256, max_tokens: 4096 };
  const length = (settings, room, text = "") => lengthOf(settings, [{ content: text }], auto, room);
  assert.deepEqual(length({}, 8192), { canvas: "grow", max_tokens: 4096 });
  assert.deepEqual(length({}, 4096), { canvas: "grow" });
  assert.deepEqual(length({}, 8192, "é".repeat(2048)), { canvas: "grow" });
  assert.deepEqual(length({ canvas: "other" }, 8192), { canvas: "other", max_tokens: 4096 });
  assert.deepEqual(length({ canvas: "fixed" }, 8192), { canvas: "fixed" });
  assert.deepEqual(length({ gen_length: 64, canvas: "grow" }, 8192), {});
  assert.deepEqual(lengthOf({}, [], null, 8192), {});
  assert.deepEqual(lengthOf({}, [], { first: 64, max_tokens: 9 }, 99), { max_tokens: 9 });
});

test("a number is judged before it is sent", () => {
  const whole = { name: "n", type: "integer", minimum: 1, maximum: 9 };
  const faults = [["", ""], ["5", ""], ["0", "at least 1"], ["1e9", "at most 9"], ["2.5", "whole"]];
  for (const [text, fault] of faults) assert.match(faultOf(whole, text), new RegExp(fault || "^$"));
  assert.match(faultOf(whole, "", true), /wanted a number/);
  assert.equal(faultOf({ type: "string", minimum: 1 }, "abc"), "");
  assert.match(faultOf({ type: "list" }, "1, x"), /wanted a number/);
  assert.equal(faultOf({ type: "list" }, "1, 22"), "");
  assert.equal(onPage("cfg_scale: given 1"), "guidance (cfg_scale): given 1");
  assert.equal(onPage("steps: given 1"), "steps: given 1");
  assert.equal(onPage("no field at all"), "no field at all");
});

test("a link holds the request, and nothing else is taken for one", () => {
  const state = { question: "Où? “日本” 🙂".repeat(40), panes: [{ settings: { seed: 4294967295 } }] };
  assert.deepEqual(stateIn(linkOf("http://h/x#old", state)), state);
  assert.equal(stateIn("http://h/x"), null);
  assert.equal(stateIn("http://h/x#ask=zz"), null);
});

test("a curl command survives quotes", () => {
  assert.match(curlOf("http://h/", { prompt: "it's" }, true), /Bearer \$KEY.*it'\\''s/);
});

test("a picture has every text, and ends on the last step", () => {
  const ink = { ink: "#000", muted: "#555", faint: "#999", accent: "#c00", onAccent: "#fff", paper: "#fff" };
  const trace = traced();
  trace.settle();
  trace.seek(1);
  const svg = svgOf(trace, 2, ink, "a <title>");
  assert.equal(trace.at, 1);
  assert.equal(trace.frames.length, 4);
  assert.match(svg, /^<svg [^]*<title>a &lt;title&gt;<\/title>[^]*c&amp;&lt;[^]*<\/svg>\n$/);
  const final = [...svg.matchAll(/opacity="1"[^>]*>([^<]*)/g)].map((m) => m[1]);
  assert.deepEqual(final, ["b", "c&amp;&lt;", "b"]);
});

test("what cannot be seen has a sign", () => {
  assert.deepEqual(["\n", " ", " a ", "</b>"].map(shown), ["↵", "␣", "a", "</b>"]);
});

test("a complete answer leaves nothing masked, new or proposed", () => {
  const trace = new Trace(4, [2, 3]);
  trace.push(canvas(1, "1c0.5", "2c0.25", "1p0.5", "."), 0.1);
  trace.settle();
  assert.deepEqual([...trace.view.state], [COMMITTED, COMMITTED, UNUSED, UNUSED]);
  assert.deepEqual([0, 1, 2, 3].map((i) => trace.labelAt(i)), ["a", "end", "", ""]);
  assert.ok(![0, 1, 2, 3].some((i) => trace.isFresh(i)));
  assert.deepEqual(trace.counted(), { numEnds: 1, numOthers: 1 });
  assert.deepEqual(trace.commits(), [2, 0]);
  trace.seek(0);
  assert.deepEqual([...trace.view.state], [COMMITTED, COMMITTED, PROPOSED, MASKED]);
  assert.equal(trace.isFresh(0), true);
});

test("a model is sent what was said, as each canvas has heard it", () => {
  const said = (text) => ({ text, isWhole: true });
  const talk = new Conversation({ system: " Be brief. ", turns: [
    { question: "1", answers: { A: said("a"), B: said("b") } },
    { question: "2", answers: { A: { text: "cut", isWhole: false } } },
    { question: "3", answers: { A: said("") } },
    { question: "4", answers: { A: said("d") } },
  ] });
  talk.begin(4, "5");
  const told = (name) => talk.messages(4, name).map((m) => `${m.role}: ${m.content}`);
  assert.deepEqual(told("A"), ["system: Be brief.", "user: 1", "assistant: a", "user: 4",
    "assistant: d", "user: 5"]);
  assert.deepEqual(told("B").slice(1, 5), ["user: 1", "assistant: b", "user: 4", "assistant: d"]);
});

const asked = (conversation) => conversation.shown.map((turn) => turn.question).join(" ");

test("a question asked again becomes a branch, and every branch can be shown", () => {
  const answers = { A: { text: "x", isWhole: true } };
  const talk = new Conversation({ turns: ["a", "b", "c"].map((question) => ({ question, answers })) });
  assert.equal(asked(talk), "a b c");
  talk.begin(1, "B");
  talk.begin(2, "C");
  talk.begin(1, "b again");
  assert.equal(asked(talk), "a b again");
  assert.deepEqual(talk.branches(1), { all: [1, 3, 5], at: 2 });
  talk.choose(1, -1);
  assert.equal(asked(talk), "a B C");
  talk.choose(1, -1);
  assert.equal(asked(talk), "a b c");
  talk.choose(1, -1);
  assert.equal(asked(talk), "a b c");
  talk.begin(0, "z");
  assert.equal(asked(talk), "z");
  assert.deepEqual(talk.branches(0), { all: [0, 6], at: 1 });
  assert.deepEqual(talk.messages(0, "A"), [{ role: "user", content: "z" }]);
  const again = new Conversation(JSON.parse(JSON.stringify(talk.record)));
  assert.equal(asked(again), "z");
  again.choose(0, -1);
  assert.equal(asked(again), "a b again");
  assert.equal(talk.turns.length, 7);
});

test("a conversation of unknown origin is read with care", () => {
  const saved = { title: "T", leaf: 2, turns: [
    { question: "a", answers: { A: { text: "x", isWhole: true, speed: { tokens: 1, seconds: 2, steps: 3 } } }, parent: -1 },
    { question: "b", answers: {}, parent: 0 },
    { question: 3, answers: { A: { text: 4, verdict: 5, speed: 6 } }, parent: 0 },
  ] };
  const talk = Conversation.read(JSON.parse(jsonOf(Conversation.read(saved))));
  assert.equal(asked(talk), "a 3");
  assert.equal(talk.name, "T");
  assert.deepEqual(talk.shown[1].answers.A.text, "4");
  assert.equal(talk.shown[1].answers.A.speed, null);
  assert.equal(talk.shown[0].answers.A.speed.steps, 3);
  assert.notEqual(talk.id, Conversation.read({ ...saved, id: talk.id }).id);
  for (const parent of [0, 1, -2, "a", 0.5]) {
    assert.throws(() => Conversation.read({ turns: [{ question: "a", answers: {}, parent }] }));
  }
  for (const bad of [null, { turns: 5 }, { turns: [null] }, { turns: [{ question: "a" }] }]) {
    assert.throws(() => Conversation.read(bad));
  }
});

test("a turn that was never answered is not kept", () => {
  const talk = new Conversation({ turns: [{ question: "a", answers: { A: { text: "x" } } }] });
  assert.equal(talk.dropUnanswered(), null);
  talk.begin(1, "b");
  assert.equal(talk.dropUnanswered().question, "b");
  assert.equal(asked(talk), "a");
  const empty = new Conversation();
  empty.begin(0, "c");
  empty.dropUnanswered();
  assert.equal(asked(empty), "");
});

test("a conversation is saved whole as JSON, and its shown branch as Markdown", () => {
  const talk = new Conversation({ title: "Sums", system: "Be brief.", turns: [
    { question: "1+1?", answers: { A: { text: "3" } } },
  ] });
  talk.begin(0, "1 + 1?").answers = { A: { text: "2" }, B: { text: "", note: "Stopped." } };
  const { title, turns, leaf } = JSON.parse(jsonOf(talk));
  assert.deepEqual([title, turns.map((turn) => turn.question), leaf], ["Sums", ["1+1?", "1 + 1?"], 1]);
  assert.equal(markdownOf(talk), "# Sums\n\n**System prompt:** Be brief.\n\n## Question\n\n1 + 1?\n\n" +
    "## Answer A\n\n2\n\n## Answer B\n\n*Stopped.*\n");
  assert.equal(fileNameOf("Was heißt: a/b?", "md"), "was-heißt-a-b.md");
  assert.equal(fileNameOf("../..", "json"), "conversation.json");
});

test("what a tab keeps is read again, and what it cannot read is nothing", () => {
  const held = new Map();
  const storage = { getItem: (key) => held.get(key) ?? null, setItem: (key, text) => held.set(key, text) };
  assert.equal(kept(storage), null);
  keep(storage, { id: "a", panes: [] });
  assert.deepEqual(kept(storage), { id: "a", panes: [] });
  assert.doesNotThrow(() => keep({ setItem() { throw new Error("full"); } }, { panes: [] }));
  for (const text of ["{", "null", "{}", "[]"]) {
    storage.setItem([...held.keys()][0], text);
    assert.equal(kept(storage), null);
  }
});

test("metrics are read as Prometheus writes them", () => {
  const samples = samplesOf([
    "# HELP x y", 'x_total{a="b",reason="say \\"no\\""} 2.0', "x_total 3",
    't_bucket{engine="0",le="0.1"} 1', 't_bucket{engine="0",le="+Inf"} 4',
    't_bucket{engine="1",le="0.1"} 2', 't_bucket{engine="1",le="+Inf"} 2',
  ].join("\n"));
  assert.equal(samples[0].labels.a, "b");
  assert.equal(sumOf(samples, "x_total"), 5);
  assert.deepEqual(bucketsOf(samples, "t"), [[0.1, 3], [Infinity, 3]]);
});

test("an answer is checked against what it was asked to match", () => {
  const schema = {
    type: "object",
    properties: {
      city: { type: "string", maxLength: 3 }, n: { type: "integer", minimum: 1, multipleOf: 2 },
      more: { type: "array", items: { $ref: "#/$defs/kind" }, maxItems: 2 },
      any: { anyOf: [{ type: "null" }, { enum: [[1], "x"] }] },
    },
    required: ["city"], additionalProperties: false, $defs: { kind: { const: "k" } },
  };
  const good = [{ city: "Rom" }, { city: "é€😀", n: 4, more: ["k", "k"] }, { city: "", any: null },
    { city: "", any: [1] }];
  const bad = [{}, [], "Rom", { city: "Rome" }, { city: 1 }, { city: "", n: 3 }, { city: "", n: 0 },
    { city: "", n: 2.5 }, { city: "", more: ["k", "k", "k"] }, { city: "", more: ["j"] },
    { city: "", any: 1 }, { city: "", other: 1 }];
  for (const value of good) assert.ok(matches({ json: schema }, JSON.stringify(value)), value);
  for (const value of bad) assert.ok(!matches({ json: schema }, JSON.stringify(value)), value);
  assert.equal(matches({ json: schema }, '{"city": "Rom"'), false);
  assert.equal(matches({ json_object: true }, "{}"), true);
  assert.equal(matches({ json_object: true }, "[]"), false);
  assert.equal(matches({ regex: "a(?P<b>b)?|c" }, "ab"), true);
  assert.equal(matches({ regex: "a|c" }, "ac"), false);
  assert.equal(matches({ regex: "(" }, "("), null);
  assert.equal(matches({ choice: ["yes", "no"] }, "no"), true);
  assert.equal(matches({ choice: ["yes", "no"] }, "n"), false);
});

test("what an answer must match is written and read", () => {
  for (const language of [{ choice: ["a", "b c"] }, { regex: "a+" }, { json: { enum: [1] } }, { json_object: true }]) {
    assert.deepEqual(languageOf(...writtenOf(language)), language);
  }
  assert.throws(() => languageOf("json", "{"), /JSON schema: /);
  assert.throws(() => languageOf("regex", " "), /wanted a regular expression/);
});

test("locked ranges join, move with the text, and end where it changes", () => {
  const text = "one two three";
  let ranges = locked(locked([], [0, 3]), [8, 13]);
  assert.deepEqual(ranges, [[0, 3], [8, 13]]);
  assert.deepEqual(locked(ranges, [2, 5]), [[0, 5], [8, 13]]);
  assert.deepEqual(locked(ranges, [3, 8]), [[0, 13]]);
  assert.deepEqual(locked(ranges, [4, 4]), ranges);
  assert.deepEqual(partsOf(ranges, text), [["one", true], [" two ", false], ["three", true]]);
  assert.deepEqual(moved(ranges, text, "one twenty three"), [[0, 3], [11, 16]]);
  assert.deepEqual(moved(ranges, text, "one two thr"), [[0, 3]]);
  assert.deepEqual(moved(ranges, text, text), ranges);
  assert.deepEqual(moved(ranges, text, `>${text}`), [[1, 4], [9, 14]]);
  assert.deepEqual(inCharacters([[3, 5]], "a😀bc"), [[2, 4]]);
});

test("a revision has the length of its text", () => {
  const settings = { algorithm: "semi_ar", gen_length: 32, steps: 8, canvas: "grow", structured_outputs: {}, seed: 1 };
  assert.deepEqual(revising(settings), { algorithm: "semi_ar", seed: 1 });
});
