// Dry run: the decision that a pasted request would get now.

import { RequestError, fetchJson } from "./api.js";
import { byId, element } from "./dom.js";
import { explanationNodes } from "./explanation.js";

const EXAMPLE = {
  model: "",
  messages: [{ role: "user", content: "Hello" }],
  max_tokens: 16,
};

/** Of the pseudo-headers, the method is always POST, and the path has a field of its own. */
const HEADER_LINE = /^(:authority|[^:\s]+)\s*:\s*(.*)$/;

export function createDryRun() {
  const form = byId("dry-run-form");
  const body = byId("dry-run-body");
  const result = byId("dry-run-explanation");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const lines = byId("dry-run-headers").value.split("\n").map((line) => line.trim());
    const wrong = lines.find((line) => line !== "" && !HEADER_LINE.test(line));
    result.replaceChildren(
      ...(wrong === undefined
        ? await explain(byId("dry-run-path").value, parseHeaders(lines), body.value)
        : [element("p", { class: "card failure" }, `Expected "name: value" as a header, found "${wrong}".`)]),
    );
  });
  return {
    title: "Dry run",
    isLive: false,
    async refresh() {
      if (body.value === "") {
        const { decisions } = await fetchJson("../debug/decisions?limit=1");
        const model = decisions[0]?.model ?? "";
        body.value = JSON.stringify({ ...EXAMPLE, model }, null, 2);
      }
    },
  };
}

/** Lines of `name: value` as headers of a dry run, in lower case: one may replace that of the form. */
function parseHeaders(lines) {
  const pairs = lines.map((line) => HEADER_LINE.exec(line)).filter((match) => match !== null);
  return Object.fromEntries(
    pairs.map(([, name, value]) => [`x-explain-header-${nameOf(name.toLowerCase())}`, value]),
  );
}

/** The name of a header in HTTP/1, which calls the authority `host`. */
function nameOf(name) {
  return name === ":authority" ? "host" : name;
}

async function explain(path, headers, body) {
  try {
    const outcome = await fetchJson("../debug/explain", {
      method: "POST",
      headers: {
        "content-type": "application/octet-stream",
        "x-explain-path": path,
        "x-explain-header-content-type": "application/json",
        ...headers,
      },
      body,
    });
    return explanationNodes(outcome);
  } catch (error) {
    if (error instanceof RequestError) {
      const isOfRequest = error.status > 0 && error.status !== 401 && error.status !== 403;
      const word = isOfRequest ? `The client would get status ${error.status}: ` : "";
      return [element("p", { class: "card failure" }, word + error.message)];
    }
    if (error instanceof TypeError) {
      return [element("p", { class: "card failure" }, "A header has a name or value that HTTP does not allow.")];
    }
    throw error;
  }
}
