// SPDX-License-Identifier: Apache-2.0
// The controls of one request, made from the server's own table of algorithms and parameters.

import { KINDS, languageOf, writtenOf } from "./guided.js";

const LABELS = {
  gen_length: "length", steps: "steps", block_length: "block", temperature: "temperature",
  cache: "cache", cfg_scale: "guidance", remasking: "remasking", seed: "seed",
};

export class Controls {
  // box: the element that holds them. options: the server's. changed: called on every change.
  constructor(box, options, changed) {
    this.box = box;
    this.options = options;
    this.changed = changed;
    this.given = {}; // by name; kept while another algorithm is chosen that does not use it
    this.algorithm = options.algorithm;
    this.kind = ""; // of what an answer must match; "" for anything
    this.text = "";
    this.draw();
  }

  get fields() {
    return this.options.algorithms[this.algorithm].fields;
  }

  // What is wrong with what an answer shall match; "" for nothing.
  get problem() {
    try {
      if (this.kind) languageOf(this.kind, this.text);
    } catch (error) {
      return error.message;
    }
    return "";
  }

  // What the request says: the algorithm, and every value that is set.
  settings() {
    const found = { algorithm: this.algorithm };
    for (const field of this.fields) {
      const value = this.given[field.name] ?? field.default;
      if (value !== undefined) found[field.name] = value;
    }
    if (this.kind && !this.problem) found.structured_outputs = languageOf(this.kind, this.text);
    return found;
  }

  // The same without defaults, for `set`.
  chosen() {
    const language = this.settings().structured_outputs;
    return { algorithm: this.algorithm, ...this.given, ...(language && { structured_outputs: language }) };
  }

  set({ algorithm, structured_outputs: language, ...given }) {
    if (algorithm in this.options.algorithms) this.algorithm = algorithm;
    [this.kind, this.text] = language ? writtenOf(language) : ["", ""];
    this.given = given;
    this.draw();
  }

  draw() {
    const { commits } = this.options.algorithms[this.algorithm];
    const names = Object.keys(this.options.algorithms);
    const pick = { name: "algorithm", type: "string", choices: names, doc: commits };
    this.box.replaceChildren(
      this.control(pick, this.algorithm),
      about(`Commits ${commits}.`),
      ...this.fields.map((field) => this.control(field, this.given[field.name])),
      this.kindControl(),
      ...(KINDS[this.kind]?.hint ? [this.textControl()] : []),
    );
  }

  // What an answer must match.
  kindControl() {
    const select = document.createElement("select");
    select.name = "answer";
    select.add(new Option("anything", ""));
    for (const [kind, { name }] of Object.entries(KINDS)) select.add(new Option(name, kind));
    select.value = this.kind;
    select.addEventListener("change", () => {
      this.kind = select.value;
      this.text = KINDS[this.kind]?.example ?? "";
      this.draw();
      this.box.querySelector("[name=answer]").focus();
      this.changed();
    });
    return labelled("answer", "What the answer must match, whatever the model would rather say.", select);
  }

  textControl() {
    const { hint } = KINDS[this.kind];
    const box = document.createElement("textarea");
    Object.assign(box, { name: "language", value: this.text, spellcheck: false, wrap: "off" });
    box.rows = Math.min(6, this.text.split("\n").length);
    box.addEventListener("input", () => {
      this.text = box.value;
      box.setCustomValidity(this.problem);
      this.changed();
    });
    const label = labelled(hint, hint, box);
    label.classList.add("wide");
    return label;
  }

  control(field, value) {
    const input = field.choices ? selectOf(field, value) : inputOf(field, value);
    input.name = field.name;
    input.addEventListener("change", () => this.take(field, input));
    return labelled(LABELS[field.name] ?? field.name.replaceAll("_", " "), sentence(field.doc), input);
  }

  take(field, input) {
    if (field.name === "algorithm") {
      this.algorithm = input.value;
      this.draw();
      this.box.querySelector("select").focus();
    } else if (input.value === "" && input.type !== "checkbox") {
      delete this.given[field.name];
    } else {
      this.given[field.name] = valueOf(field, input);
    }
    this.changed();
  }
}

// An explanation; what stands between backticks is code.
function about(text) {
  const found = Object.assign(document.createElement("p"), { className: "about" });
  text.split("`").forEach((part, k) => {
    found.append(k % 2 ? Object.assign(document.createElement("code"), { textContent: part }) : part);
  });
  return found;
}

function labelled(name, title, input) {
  const label = document.createElement("label");
  Object.assign(label, { className: "control", title });
  label.append(Object.assign(document.createElement("span"), { textContent: name }), input);
  return label;
}

function selectOf(field, value) {
  const select = document.createElement("select");
  for (const choice of field.choices) select.add(new Option(choice, choice));
  select.value = value ?? field.default ?? field.choices[0];
  return select;
}

function inputOf(field, value) {
  const input = document.createElement("input");
  if (field.type === "boolean") {
    input.type = "checkbox";
    input.checked = value ?? field.default ?? false;
    return input;
  }
  const isNumber = field.type === "integer" || field.type === "number";
  input.type = isNumber ? "number" : "text";
  if (isNumber) {
    input.step = field.type === "integer" ? 1 : "any";
    if (field.minimum !== undefined) input.min = field.minimum;
    if (field.maximum !== undefined) input.max = field.maximum;
  }
  input.placeholder = field.default ?? "auto";
  input.value = value ?? "";
  return input;
}

function valueOf(field, input) {
  if (field.type === "boolean") return input.checked;
  if (field.type === "list") return input.value.split(/[ ,]+/).filter(Boolean).map(Number);
  return field.type === "string" ? input.value : Number(input.value);
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1).replaceAll("`", "")}.`;
