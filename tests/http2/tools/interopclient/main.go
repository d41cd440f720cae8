// Command interopclient runs gRPC's interop cases of grpc-go against a server.
//
//	interopclient -address 127.0.0.1:9002 [-tls] CASE...
//
// A case that fails ends the process with 1. The cases are described in
// doc/interop-test-descriptions.md of grpc/grpc.
package main

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/interop"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"
)

// Longest time of a case: more than a busy machine takes.
const limit = 5 * time.Minute

type testCase func(context.Context, testgrpc.TestServiceClient, *grpc.ClientConn)

func of(do func(context.Context, testgrpc.TestServiceClient, ...grpc.CallOption)) testCase {
	return func(ctx context.Context, client testgrpc.TestServiceClient, _ *grpc.ClientConn) {
		do(ctx, client)
	}
}

var testCases = map[string]testCase{
	"empty_unary":                 of(interop.DoEmptyUnaryCall),
	"large_unary":                 of(interop.DoLargeUnaryCall),
	"client_streaming":            of(interop.DoClientStreaming),
	"server_streaming":            of(interop.DoServerStreaming),
	"ping_pong":                   of(interop.DoPingPong),
	"empty_stream":                of(interop.DoEmptyStream),
	"timeout_on_sleeping_server":  of(interop.DoTimeoutOnSleepingServer),
	"cancel_after_begin":          of(interop.DoCancelAfterBegin),
	"cancel_after_first_response": of(interop.DoCancelAfterFirstResponse),
	"status_code_and_message":     of(interop.DoStatusCodeAndMessage),
	"special_status_message":      of(interop.DoSpecialStatusMessage),
	"unimplemented_method": func(ctx context.Context, _ testgrpc.TestServiceClient, conn *grpc.ClientConn) {
		interop.DoUnimplementedMethod(ctx, conn)
	},
	"unimplemented_service": func(ctx context.Context, _ testgrpc.TestServiceClient, conn *grpc.ClientConn) {
		interop.DoUnimplementedService(ctx, testgrpc.NewUnimplementedServiceClient(conn))
	},
}

func main() {
	address := flag.String("address", "", "host:port of the server")
	withTLS := flag.Bool("tls", false, "use TLS, without verifying the certificate")
	flag.Parse()
	transport := insecure.NewCredentials()
	if *withTLS {
		transport = credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})
	}
	conn, err := grpc.NewClient(*address, grpc.WithTransportCredentials(transport))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	client := testgrpc.NewTestServiceClient(conn)
	for _, name := range flag.Args() {
		run, known := testCases[name]
		if !known {
			fmt.Fprintf(os.Stderr, "unknown case %s\n", name)
			os.Exit(1)
		}
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		run(ctx, client, conn) // ends the process where the case fails
		cancel()
		fmt.Println(name)
	}
}
