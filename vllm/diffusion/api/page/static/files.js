// SPDX-License-Identifier: Apache-2.0
// Files that a user saves: conversations as JSON and as Markdown, and pictures.

// Save a text as a file of the browser's downloads.
export function saveFile(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// A file name without characters that a file system may refuse.
export function fileNameOf(title, suffix) {
  const name = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  return `${name.slice(0, 60) || "conversation"}.${suffix}`;
}

// A conversation with all its branches.
export function jsonOf(conversation) {
  const { title, name, system, turns, leaf, changed } = conversation;
  const saved = { title: title || name, system, changed: new Date(changed).toISOString(), leaf, turns };
  return `${JSON.stringify(saved, null, 1)}\n`;
}

// The branch that is shown.
export function markdownOf(conversation) {
  const { name, system, shown } = conversation;
  const parts = [`# ${name}`];
  if (system.trim()) parts.push(`**System prompt:** ${system.trim()}`);
  for (const { question, answers } of shown) {
    const all = Object.entries(answers);
    parts.push("## Question", question, ...all.flatMap(([canvas, { text, note }]) => [
      all.length > 1 ? `## Answer ${canvas}` : "## Answer", text.trim() || `*${note || "No answer."}*`,
    ]));
  }
  return `${parts.join("\n\n")}\n`;
}
