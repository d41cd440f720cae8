"""What of a prompt each endpoint is believed to hold in its prefix cache.

Here live: `blocks`, the cutting of a prompt into chained block hashes; `index`, who holds which
block; `runs`, the tree it is kept in; `radix_tree`, the bounded part of that tree one endpoint holds;
`calibration`, how well predictions of cached tokens come true.

Not here: what a match is worth (scheduling), when a request is recorded (dispatch), what an engine
says of its own cache (scrape). The dispatcher drives this room: chain, match, and after the pick
record. Nothing here waits, reads a clock or draws chance; everything happens on one thread.
"""
