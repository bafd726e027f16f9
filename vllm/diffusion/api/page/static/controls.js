// SPDX-License-Identifier: Apache-2.0
// The controls of one request, made from the server's own table of algorithms and parameters.
// What a number's control holds is checked here, before it is sent.

import { KINDS, languageOf, writtenOf } from "./guided.js";

const LABELS = {
  gen_length: "length", block_length: "block", cfg_scale: "guidance",
  num_speculative_states: "guessed states",
};
const labelOf = (name) => LABELS[name] ?? name.replaceAll("_", " ");

// An error of the server, which begins with a field's name, with the name that stands on the page.
export function onPage(message) {
  return message.replace(/^(\w+)(?=: )/, (name) => (LABELS[name] ? `${LABELS[name]} (${name})` : name));
}

// What is wrong with a control's value, in the words of the server; "" for nothing.
export function faultOf(field, text, isUnreadable = false) {
  const numbers = field.type === "list" ? text.split(/[ ,]+/).filter(Boolean).map(Number) : [Number(text)];
  const isNumber = field.type === "integer" || field.type === "number" || field.type === "list";
  if (!isNumber || (text === "" && !isUnreadable)) return "";
  const wanted = isUnreadable || !numbers.every(Number.isFinite) ? "a number"
    : field.type === "integer" && !numbers.every(Number.isInteger) ? "a whole number"
    : numbers.some((value) => value < field.minimum) ? `at least ${field.minimum}`
    : numbers.some((value) => value > field.maximum) ? `at most ${field.maximum}` : "";
  return wanted && `given ${isUnreadable ? "no number" : text}; wanted ${wanted}`;
}

export class Controls {
  // box: the element that holds them. options: the server's. changed: called on every change.
  constructor(box, options, changed) {
    this.box = box;
    this.options = options;
    this.changed = changed;
    this.given = {}; // by name; kept while another algorithm is chosen that does not use it
    this.faults = {}; // by name: what is wrong with the controls that are shown
    this.algorithm = options.algorithm;
    this.kind = ""; // of what an answer must match; "" for anything
    this.text = "";
    this.draw();
  }

  get fields() {
    return this.options.algorithms[this.algorithm].fields;
  }

  // What is wrong with the settings; "" for nothing.
  get problem() {
    const [fault] = Object.entries(this.faults);
    return fault ? onPage(`${fault[0]}: ${fault[1]}`) : this.languageProblem;
  }

  // What is wrong with what an answer shall match; "" for nothing.
  get languageProblem() {
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
    if (this.kind && !this.languageProblem) found.structured_outputs = languageOf(this.kind, this.text);
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

  // Back to what the server begins with.
  reset() {
    this.set({ algorithm: this.options.algorithm });
  }

  draw() {
    this.faults = {};
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
    box.rows = Math.max(2, Math.min(6, this.text.split("\n").length));
    box.addEventListener("input", () => {
      this.text = box.value;
      box.setCustomValidity(this.languageProblem);
      this.changed();
    });
    const label = labelled(hint, hint, box);
    label.classList.add("wide");
    return label;
  }

  control(field, value) {
    const most = field.name === "gen_length" ? this.options.max_model_len : undefined;
    const limited = { maximum: most, ...field };
    const input = field.choices ? selectOf(limited, value) : inputOf(limited, value);
    input.name = field.name;
    const label = labelled(labelOf(field.name), `${field.name}: ${sentence(field.doc)}`, input);
    const judge = () => this.judge(limited, input, label);
    input.addEventListener("input", judge);
    input.addEventListener("change", () => (judge(), this.take(field, input)));
    judge();
    return label;
  }

  // Note what is wrong with a value, and say so under its control.
  judge(field, input, label) {
    const fault = faultOf(field, input.value, input.validity.badInput);
    if (fault) this.faults[field.name] = fault;
    else delete this.faults[field.name];
    input.setAttribute("aria-invalid", Boolean(fault));
    label.querySelector(".fault")?.remove();
    if (!fault) return;
    label.append(Object.assign(document.createElement("span"), { className: "fault", textContent: fault }));
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
