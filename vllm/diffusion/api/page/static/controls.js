// SPDX-License-Identifier: Apache-2.0
// The controls of one request, built from the server's table of algorithms and parameters.
// Numbers are checked here before they are sent.

import { KINDS, languageOf, writtenOf } from "./guided.js";

const LABELS = {
  gen_length: "length", block_length: "block", cfg_scale: "guidance",
  num_speculative_states: "drafts per step",
};
const labelOf = (name) => LABELS[name] ?? name.replaceAll("_", " ");

// Replace the field name at the start of a server's error by the label on the page.
export function onPage(message) {
  return message.replace(/^(\w+)(?=: )/, (name) => (LABELS[name] ? `${LABELS[name]} (${name})` : name));
}

// The error of a control's value in the form of the server's messages, or "" if it is valid.
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
  // box: the parent element. options: the server's options. changed: called on every change.
  constructor(box, options, changed) {
    this.box = box;
    this.options = options;
    this.changed = changed;
    // Values by name. They are kept while an algorithm is selected that does not use them.
    this.given = {};
    this.faults = {}; // errors of the visible controls, by name
    this.algorithm = options.algorithm;
    this.model = options.model; // the served model or an adapter
    this.kind = ""; // kind of format that the answer must match; "" if it is free
    this.text = "";
    this.draw();
  }

  get fields() {
    return this.options.algorithms[this.algorithm].fields;
  }

  // What a request without a length gets, or null.
  get autoLength() {
    return this.options.algorithms[this.algorithm].auto_length;
  }

  // The error of the settings, or "" if they are valid.
  get problem() {
    const [fault] = Object.entries(this.faults);
    return fault ? onPage(`${fault[0]}: ${fault[1]}`) : this.languageProblem;
  }

  // The error of the format that the answer must match, or "" if it is valid.
  get languageProblem() {
    try {
      if (this.kind) languageOf(this.kind, this.text);
    } catch (error) {
      return error.message;
    }
    return "";
  }

  // The settings of the request: the algorithm, and every value that is set or has a default.
  settings() {
    const found = { ...this.namedModel, algorithm: this.algorithm };
    for (const field of this.fields) {
      const value = this.given[field.name] ?? field.default;
      if (value !== undefined) found[field.name] = value;
    }
    if (this.kind && !this.languageProblem) found.structured_outputs = languageOf(this.kind, this.text);
    return found;
  }

  // The model that the request names: none if there is only one.
  get namedModel() {
    return this.options.adapters?.length ? { model: this.model } : {};
  }

  // The settings without defaults, in the form that `set` accepts.
  chosen() {
    const language = this.settings().structured_outputs;
    return { ...this.namedModel, algorithm: this.algorithm, ...this.given, ...(language && { structured_outputs: language }) };
  }

  set({ algorithm, model, structured_outputs: language, ...given }) {
    const { model: served, adapters = [] } = this.options;
    this.model = adapters.includes(model) ? model : served;
    if (algorithm in this.options.algorithms) this.algorithm = algorithm;
    [this.kind, this.text] = language ? writtenOf(language) : ["", ""];
    this.given = given;
    this.draw();
  }

  // Restore the server's defaults.
  reset() {
    this.set({ algorithm: this.options.algorithm });
  }

  draw() {
    this.faults = {};
    const { commits } = this.options.algorithms[this.algorithm];
    const names = Object.keys(this.options.algorithms);
    const pick = { name: "algorithm", type: "string", choices: names, default: names[0], doc: commits };
    this.box.replaceChildren(
      ...this.modelControl(),
      this.control(pick, this.algorithm),
      about(`Commits ${commits}.`),
      ...this.fields.map((field) => this.control(field, this.given[field.name])),
      this.kindControl(),
      ...(KINDS[this.kind]?.hint ? [this.textControl()] : []),
    );
  }

  // The control for the model, if there are adapters.
  modelControl() {
    const { model, adapters = [] } = this.options;
    if (!adapters.length) return [];
    const doc = "the served model, or an adapter";
    const field = { name: "model", type: "string", choices: [model, ...adapters], default: model, doc };
    return [this.control(field, this.model)];
  }

  // The control for the kind of format that the answer must match.
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
    return labelled("answer", "Require that the answer matches a format.", select);
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

  // Check a value, store its error and show the error under its control.
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
    } else if (field.name === "model") {
      this.model = input.value;
    } else if (input.value === "" && input.type !== "checkbox") {
      delete this.given[field.name];
    } else {
      this.given[field.name] = valueOf(field, input);
    }
    this.changed();
  }
}

// A paragraph of explanation; text between backticks becomes code.
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
  if (field.default === undefined) select.add(new Option("auto", ""));
  for (const choice of field.choices) select.add(new Option(choice, choice));
  select.value = value ?? field.default ?? "";
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
