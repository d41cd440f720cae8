"""Wire format: the only package that uses protobuf; bytes to messages and back.

The package contains the codec and the compiled definitions of `proto/`. It must not decide about
replies. The gRPC server uses `decode` and `encode` as its deserializer and serializer.
"""
