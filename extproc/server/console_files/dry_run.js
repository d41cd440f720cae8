// Dry run: the decision that a pasted request would get now.

import { RequestError, fetchJson } from "./api.js";
import { byId, element } from "./dom.js";
import { explanationNodes } from "./explanation.js";

const EXAMPLE = {
  model: "",
  messages: [{ role: "user", content: "Hello" }],
  max_tokens: 16,
};

export function createDryRun() {
  const form = byId("dry-run-form");
  const body = byId("dry-run-body");
  const result = byId("dry-run-explanation");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const headers = parseHeaders(byId("dry-run-headers").value);
    result.replaceChildren(...(await explain(byId("dry-run-path").value, headers, body.value)));
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

/** Lines of `name: value` as the headers that a dry run takes. */
function parseHeaders(text) {
  const pairs = text.split("\n").map((line) => line.split(/:(.*)/s, 2).map((part) => part.trim()));
  return Object.fromEntries(
    pairs.filter(([name, value]) => name && value !== undefined).map(([name, value]) => [`x-explain-header-${name}`, value]),
  );
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
      const word = error.status > 0 ? `The client would get status ${error.status}: ` : "";
      return [element("p", { class: "card failure" }, word + error.message)];
    }
    if (error instanceof TypeError) {
      return [element("p", { class: "card failure" }, "A header has a name or value that HTTP does not allow.")];
    }
    throw error;
  }
}
