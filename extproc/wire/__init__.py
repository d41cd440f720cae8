"""Wire format: the only package that uses protobuf; bytes to messages and back.

What lives here: the codec and the compiled definitions of `proto/`. What must not: any decision
about what to answer. Who drives it: the gRPC server uses `decode` and `encode` as its
(de)serialisers.
"""
