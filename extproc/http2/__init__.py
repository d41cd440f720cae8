"""HTTP/2 for gRPC servers without I/O: bytes of a peer to events, and calls to bytes."""
