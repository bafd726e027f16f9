// SPDX-License-Identifier: Apache-2.0
// Draws the routes of /openapi.json, which asks nothing of other hosts.

const dark = matchMedia("(prefers-color-scheme: dark)");
const adopt = () => document.documentElement.classList.toggle("dark-mode", dark.matches);

dark.addEventListener("change", adopt);
adopt();

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#routes",
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  validatorUrl: null, // else a badge of another host's
});
