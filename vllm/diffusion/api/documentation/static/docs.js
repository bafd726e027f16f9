// SPDX-License-Identifier: Apache-2.0
// Renders the routes of /openapi.json without requests to other hosts.

const dark = matchMedia("(prefers-color-scheme: dark)");
const applyTheme = () => document.documentElement.classList.toggle("dark-mode", dark.matches);

dark.addEventListener("change", applyTheme);
applyTheme();

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#routes",
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  validatorUrl: null, // would load a badge from another host
});
