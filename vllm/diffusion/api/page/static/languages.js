// SPDX-License-Identifier: Apache-2.0
// The programming languages that answers are coloured in.

import hljs from "./vendor/highlight/core.min.js";
import bash from "./vendor/highlight/bash.min.js";
import cpp from "./vendor/highlight/cpp.min.js";
import go from "./vendor/highlight/go.min.js";
import java from "./vendor/highlight/java.min.js";
import javascript from "./vendor/highlight/javascript.min.js";
import json from "./vendor/highlight/json.min.js";
import python from "./vendor/highlight/python.min.js";
import rust from "./vendor/highlight/rust.min.js";
import sql from "./vendor/highlight/sql.min.js";
import typescript from "./vendor/highlight/typescript.min.js";
import xml from "./vendor/highlight/xml.min.js";
import yaml from "./vendor/highlight/yaml.min.js";

const LANGUAGES = { bash, cpp, go, java, javascript, json, python, rust, sql, typescript, xml, yaml };

for (const [name, grammar] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, grammar);
hljs.registerAliases(["c", "h", "cuda", "cu"], { languageName: "cpp" });
hljs.registerAliases(["shell", "console"], { languageName: "bash" });

export default hljs;
