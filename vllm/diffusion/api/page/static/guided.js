// SPDX-License-Identifier: Apache-2.0
// Formats that an answer must match: conversion to the request's field, and a check in the browser.

const CITY = `{"type": "object",
 "properties": {"name": {"type": "string"}, "country": {"type": "string"}},
 "required": ["name", "country"]}`;

// By the name of the request's field; `example` is the initial text of the input box.
export const KINDS = {
  choice: { name: "one of", hint: "One choice per line", example: "Paris\nLondon\nBerlin" },
  regex: { name: "regex", hint: "A regular expression", example: "The [a-z]+ is [A-Z][a-z]+\\." },
  json: { name: "JSON schema", hint: "A JSON schema", example: CITY },
  json_object: { name: "JSON object" },
};

// Convert the text of the input box to `structured_outputs`; throws if the text is invalid.
export function languageOf(kind, text) {
  if (kind === "json_object") return { json_object: true };
  if (!text.trim()) throw new Error(`${KINDS[kind].name}: wanted ${KINDS[kind].hint.toLowerCase()}`);
  if (kind === "regex") return { regex: text.trim() };
  if (kind === "choice") return { choice: text.split("\n").map((c) => c.trim()).filter(Boolean) };
  try {
    return { json: JSON.parse(text) };
  } catch (error) {
    throw new Error(`JSON schema: ${error.message}`);
  }
}

// Convert `structured_outputs` back to its kind and the text of the input box.
export function writtenOf(language) {
  const [kind, value] = Object.entries(language)[0];
  if (kind === "choice") return [kind, value.join("\n")];
  return [kind, kind === "json" ? JSON.stringify(value, null, 1) : String(value)];
}

// Whether an answer matches, or null if the browser cannot decide.
export function matches(language, text) {
  const [[kind, value]] = Object.entries(language);
  if (kind === "choice") return value.includes(text);
  try {
    if (kind === "regex") return expression(value).test(text);
  } catch {
    return null;
  }
  try {
    const found = JSON.parse(text);
    return kind === "json" ? fits(value, found, value) : typeOf(found) === "object";
  } catch {
    return false;
  }
}

// Python and JavaScript have different syntax for named groups.
const expression = (regex) => new RegExp(`^(?:${regex.replaceAll("(?P<", "(?<")})$`);

const typeOf = (value) => (value === null ? "null" : Array.isArray(value) ? "array" : typeof value);
const isSame = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const within = (value, least = -Infinity, most = Infinity) => value >= least && value <= most;

const CHECKS = {
  object(schema, value, root) {
    const { properties = {}, required = [], additionalProperties: more = true } = schema;
    return required.every((name) => name in value) && Object.entries(value).every(
      ([name, member]) => fits(properties[name] ?? more, member, root));
  },
  array({ prefixItems = [], items = true, minItems, maxItems }, value, root) {
    return within(value.length, minItems, maxItems) &&
      value.every((item, k) => fits(prefixItems[k] ?? items, item, root));
  },
  string({ minLength, maxLength, pattern }, value) {
    return within([...value].length, minLength, maxLength) &&
      (pattern === undefined || new RegExp(pattern).test(value));
  },
  number({ minimum, maximum, exclusiveMinimum: above, exclusiveMaximum: below, multipleOf }, value) {
    return within(value, minimum, maximum) && !(value <= above) && !(value >= below) &&
      (multipleOf === undefined || value % multipleOf === 0);
  },
};

function fits(schema, value, root) {
  if (typeof schema === "boolean") return schema;
  if (schema.$ref) {
    const path = schema.$ref.split("/").slice(1);
    return fits(path.reduce((part, name) => part[name], root), value, root);
  }
  const type = typeOf(value);
  const types = [schema.type ?? type].flat();
  const isTyped = types.includes(type) || (types.includes("integer") && Number.isInteger(value));
  const every = schema.allOf ?? [], some = schema.anyOf ?? schema.oneOf ?? [true];
  return isTyped
    && (schema.enum ?? [value]).some((one) => isSame(one, value))
    && (schema.const === undefined || isSame(schema.const, value))
    && every.every((part) => fits(part, value, root)) && some.some((part) => fits(part, value, root))
    && (CHECKS[type]?.(schema, value, root) ?? true);
}
