// SPDX-License-Identifier: Apache-2.0
// Locked ranges [start, stop] of a text: ascending, apart from each other, in JavaScript's units.

// Add a range; ranges that touch become one.
export function locked(ranges, [start, stop]) {
  if (start >= stop) return ranges;
  const apart = ranges.filter(([a, b]) => b < start || a > stop);
  const joined = ranges.filter(([a, b]) => b >= start && a <= stop);
  const first = Math.min(start, ...joined.map(([a]) => a)), last = Math.max(stop, ...joined.map(([, b]) => b));
  return [...apart, [first, last]].sort(([a], [b]) => a - b);
}

// The ranges after the text was changed; a range with a changed character is no longer locked.
export function moved(ranges, before, after) {
  const shorter = Math.min(before.length, after.length);
  let head = 0, tail = 0;
  while (head < shorter && before[head] === after[head]) head++;
  while (tail < shorter - head && before.at(-1 - tail) === after.at(-1 - tail)) tail++;
  const end = before.length - tail, by = after.length - before.length;
  return ranges.flatMap(([a, b]) => (b <= head ? [[a, b]] : a >= end ? [[a + by, b + by]] : []));
}

// The same ranges in characters, as the server counts them.
export const inCharacters = (ranges, text) =>
  ranges.map((range) => range.map((at) => [...text.slice(0, at)].length));

// The text in parts [part, isLocked].
export function partsOf(ranges, text) {
  const borders = [0, ...ranges.flat(), text.length];
  return borders.slice(1).map((stop, k) => [text.slice(borders[k], stop), k % 2 === 1])
    .filter(([part]) => part);
}
