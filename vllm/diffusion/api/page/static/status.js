// SPDX-License-Identifier: Apache-2.0
// The status page. It queries the server once per second while it is visible.

import { jsonOf } from "./key.js";
import { bucketsOf, samplesOf, sumOf } from "./metrics.js";
import { reach } from "./request.js";

const PERIOD_MS = 1000;
const find = (id) => document.getElementById(id);
let before = null; // the previous samples and their time

const element = (tag, text = "", more = {}) =>
  Object.assign(document.createElement(tag), { textContent: text, ...more });

async function look() {
  const [ready, status, metrics] = await Promise.all([
    reach("ready").then((r) => r.json()),
    jsonOf("status.json"),
    reach("metrics").then((r) => r.text()),
  ]);
  const samples = samplesOf(metrics);
  showNumbers(ready, status, samples);
  showPool(status.pool_bytes, status.requests);
  showRequests(status.requests);
  showSteps(bucketsOf(samples, "dllm:step_time_seconds"));
  showRefusals(samples.filter((s) => s.name === "dllm:requests_refused_total" && s.value > 0));
  before = { samples, at: performance.now() };
}

function showNumbers(ready, status, samples) {
  find("state").textContent = ready.status;
  const info = samples.find((s) => s.name === "dllm:build_info")?.labels ?? {};
  find("engine").textContent =
    `${info.model_name ?? ""} · attention ${info.attention} · CUDA graphs ${info.graphs} · ` +
    (status.products ?? "");
  const count = (state) => status.requests.filter((r) => r.state === state).length;
  const buckets = bucketsOf(samples, "dllm:step_time_seconds");
  const numbers = [
    ["running", count("running")], ["waiting", count("waiting")],
    ["limits", `${status.max_requests} requests, ${status.row_budget} rows`],
    ["steps/s", rate(samples, "dllm:denoise_steps_total")],
    ["answer tokens/s", rate(samples, "vllm:generation_tokens_total")],
    ["median step", `≤ ${seconds(quantile(buckets, 0.5))}`],
    ["95 % of steps", `≤ ${seconds(quantile(buckets, 0.95))}`],
    ["peak pool use", bytes(sumOf(samples, "dllm:activation_pool_peak_bytes"))],
    ["host memory", bytes(status.host_bytes ?? 0)],
  ];
  find("numbers").replaceChildren(...numbers.map(([name, value]) => {
    const box = element("div");
    box.append(element("dt", name), element("dd", String(value)));
    return box;
  }));
}

// The increase of a counter per second.
function rate(samples, name) {
  if (!before) return "–";
  const rise = sumOf(samples, name) - sumOf(before.samples, name);
  return (rise / ((performance.now() - before.at) / 1000)).toFixed(1);
}

// The upper bound of the bucket that contains the quantile `share` of all observations.
function quantile(buckets, share) {
  const total = buckets.reduce((sum, [, count]) => sum + count, 0);
  let sum = 0;
  for (const [bound, count] of buckets) {
    sum += count;
    if (total && sum >= share * total) return bound;
  }
  return 0;
}

// Draw the users of the pool as parts of a bar.
function showPool(pool, requests) {
  if (!pool) return;
  const held = requests.filter((r) => r.kept_bytes > 0);
  const kept = held.reduce((sum, r) => sum + r.kept_bytes, 0);
  const shared = Math.max(0, pool.used_pages - kept); // pages of requests that have ended
  const parts = [
    ["CUDA graphs", pool.graphs, "graphs"],
    ...held.map((r) => [`keys and values of ${short(r.id)}`, r.kept_bytes, "kept"]),
    ["cached prefixes of finished requests", shared, "shared"],
    ["free pages", Math.max(0, pool.pages - Math.max(pool.used_pages, kept)), "free"],
    ["a paused long step", pool.paused, "paused"],
  ].filter(([, size]) => size > 0);
  const taken = parts.reduce((sum, [, size]) => sum + size, 0);
  parts.push(["for steps", Math.max(0, pool.budget - taken), "steps"]);
  find("pool").replaceChildren(...parts.map(([name, size, kind]) => {
    const part = element("span", "", { className: kind, title: `${name}: ${bytes(size)}` });
    part.style.flexGrow = size;
    return part;
  }));
  const labels = parts.map(([name, size]) => `${name} ${bytes(size)}`);
  find("pool").setAttribute("aria-label", `${bytes(pool.budget)}: ${labels.join(", ")}`);
  find("holders").replaceChildren(...parts.map(([name, size, kind]) =>
    element("li", `${name} ${bytes(size)}`, { className: kind })));
}

function showRequests(requests) {
  find("none").hidden = requests.length > 0;
  find("table").hidden = !requests.length;
  find("requests").replaceChildren(...requests.map(rowOf));
}

const REASONS = {
  rows: "for room in a step (--max-num-batched-tokens)",
  memory: "for memory",
  requests: "for another request to end (--max-num-seqs)",
  others: "for all other requests to end (force_single_batch)",
  prompt: "for a request that computes the same prompt",
  call: "for the other requests of its call",
  adapter: "for a slot for its adapter (--max-loras)",
  order: "for earlier requests",
};

function rowOf(request) {
  const row = element("tr");
  const isRunning = request.state === "running";
  const share = isRunning ? request.committed / request.canvas_tokens : 0;
  const left = share > 0 ? (request.seconds / share) * (1 - share) : null;
  const progress = element("td");
  if (isRunning) {
    progress.append(
      element("progress", "", { max: request.canvas_tokens, value: request.committed }),
      element("span", ` ${request.committed}/${request.canvas_tokens}`),
    );
  }
  const number = (text) => element("td", text, { className: "number" });
  row.append(
    element("td", short(request.id), { title: request.id, className: "code" }),
    element("td", isRunning ? "running" : `waits ${REASONS[request.waits_for] ?? ""}`),
    element("td", isRunning ? `${request.algorithm}, ${request.cache}` : ""),
    number(String(request.prompt_tokens)), progress,
    number(isRunning ? `${request.forwards}${request.steps ? `/${request.steps}` : ""}` : ""),
    number(request.states_drafted ? `${request.states_accepted}/${request.states_drafted}` : ""),
    number(request.kept_bytes ? bytes(request.kept_bytes) : ""),
    number(request.seconds === null ? "" : seconds(request.seconds)),
    number(left === null ? "" : seconds(left)),
  );
  return row;
}

function showSteps(buckets) {
  const most = Math.max(1, ...buckets.map(([, count]) => count));
  const seen = buckets.map(([, count]) => count > 0);
  const shown = buckets.slice(Math.max(0, seen.indexOf(true)), seen.lastIndexOf(true) + 1);
  find("steps").replaceChildren(...shown.map(([bound, count]) => {
    const line = element("div", "", { className: "line" });
    const bar = element("i");
    bar.style.width = `${(count / most) * 100}%`;
    bar.hidden = count === 0;
    const room = element("span", "", { className: "room" });
    room.append(bar);
    const name = bound === Infinity ? "longer" : `≤ ${seconds(bound)}`;
    line.append(element("span", name), room, element("span", count.toLocaleString("en")));
    return line;
  }));
}

function showRefusals(samples) {
  find("no-refusals").hidden = samples.length > 0;
  const aged = [...samples].sort((a, b) => b.value - a.value);
  find("refusals").replaceChildren(...aged.map(({ labels, value }) => {
    const row = element("tr");
    row.append(element("td", labels.reason, { className: "code" }),
      element("td", String(value), { className: "number" }));
    return row;
  }));
}

const short = (id) => (id.length > 18 ? `${id.slice(0, 15)}…` : id);

function seconds(value) {
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 120 ? `${value.toFixed(1)} s` : `${(value / 60).toFixed(1)} min`;
}

function bytes(value) {
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 1)} ${unit}`;
  }
  return `${value} B`;
}

for (;;) {
  if (!document.hidden) {
    const trouble = await look().then(() => "", (error) => error.message);
    find("trouble").textContent = trouble;
    find("trouble").hidden = !trouble;
    if (trouble) find("state").textContent = "no answer";
  }
  await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
}
