"""Parsing: request bodies into requests, and token usage from the end of responses.

The package contains the table of surfaces (`surfaces`), a module with a partial typed decode per
family of surfaces, the framing of a prompt into stable bytes (`canonical_prompt`), the fields that
all of them share with the session hint (`envelope`), the gRPC frame, the multipart form, and the place of the model in
a body (`model_edit`). It neither chooses endpoints nor keeps state between requests.

`routing` calls `surfaces.parse(raw)` once per request whose body is complete. The result is an
`InferenceRequest`, or a `Rejection` with status 400 and a text of
docs/spec/protocol.md#request-flow, without the code prefix that the wire layer adds. `parse` is
total: no bytes make it raise.

Rules of the package:

- Only paths in the table can be refused. Any other path is `opaque`: routed, whatever its body.
- A body is decoded once, partially. A second pass happens only to word an error, or to forgive
  lone surrogates.
- Only model, messages, prompt and input can make a JSON body invalid; any other field of an
  unexpected type reads as absent. The engine is the judge of everything else.
- No text from a body gets into an error message.

Prompt bytes (`InferenceRequest.prompt`) are the prompt in engine order: cache salt, template options,
tools, system prompt, messages. No trailer follows them, so the next turn of a conversation starts
with the bytes of this turn; the markers between fields are byte values that UTF-8 never
produces, so two different histories never share more than their common beginning.
"""
