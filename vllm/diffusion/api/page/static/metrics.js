// SPDX-License-Identifier: Apache-2.0
// Parser of the parts of Prometheus' text format that the status page uses.

// Parse the samples of `/metrics`: [{name, labels, value}].
export function samplesOf(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const parts = /^([\w:]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!parts) continue;
    const labels = {};
    for (const [, key, value] of (parts[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[key] = value;
    }
    found.push({ name: parts[1], labels, value: Number(parts[3]) });
  }
  return found;
}

export const sumOf = (samples, name) =>
  samples.filter((s) => s.name === name).reduce((sum, s) => sum + s.value, 0);

// Number of observations per bucket of a histogram, summed over engines: [[upper bound, count]].
export function bucketsOf(samples, name) {
  const totals = new Map();
  for (const { name: own, labels, value } of samples) {
    if (own !== `${name}_bucket`) continue;
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    totals.set(bound, (totals.get(bound) ?? 0) + value);
  }
  let below = 0;
  return [...totals].sort(([a], [b]) => a - b).map(([bound, total]) => {
    const count = total - below;
    below = total;
    return [bound, count];
  });
}
