// floor is an ext_proc server in grpc-go that does as little as the protocol allows: it waits for the
// whole body, names a constant endpoint and sends the body back in pieces of 62,000 bytes.
package main

import (
	"flag"
	"fmt"
	"io"
	"net"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
)

const pieceBytes = 62000

type server struct {
	pb.UnimplementedExternalProcessorServer
	destination []byte
}

// Process answers one stream of Envoy.
func (s *server) Process(stream pb.ExternalProcessor_ProcessServer) error {
	var body []byte
	for {
		request, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		switch message := request.Request.(type) {
		case *pb.ProcessingRequest_RequestHeaders:
			if message.RequestHeaders.EndOfStream {
				err = stream.Send(s.routeResponse())
			}
		case *pb.ProcessingRequest_RequestBody:
			body = append(body, message.RequestBody.Body...)
			if message.RequestBody.EndOfStream {
				err = s.sendBack(stream, body)
			}
		case *pb.ProcessingRequest_RequestTrailers:
			err = stream.Send(&pb.ProcessingResponse{Response: &pb.ProcessingResponse_RequestTrailers{RequestTrailers: &pb.TrailersResponse{}}})
		case *pb.ProcessingRequest_ResponseHeaders:
			err = stream.Send(&pb.ProcessingResponse{Response: &pb.ProcessingResponse_ResponseHeaders{ResponseHeaders: &pb.HeadersResponse{}}})
		case *pb.ProcessingRequest_ResponseBody:
			err = stream.Send(&pb.ProcessingResponse{Response: &pb.ProcessingResponse_ResponseBody{ResponseBody: bodyResponse(message.ResponseBody.Body, message.ResponseBody.EndOfStream)}})
		case *pb.ProcessingRequest_ResponseTrailers:
			err = stream.Send(&pb.ProcessingResponse{Response: &pb.ProcessingResponse_ResponseTrailers{ResponseTrailers: &pb.TrailersResponse{}}})
		}
		if err != nil {
			return err
		}
	}
}

func (s *server) sendBack(stream pb.ExternalProcessor_ProcessServer, body []byte) error {
	if err := stream.Send(s.routeResponse()); err != nil {
		return err
	}
	for {
		size := min(len(body), pieceBytes)
		response := bodyResponse(body[:size], size == len(body))
		if err := stream.Send(&pb.ProcessingResponse{Response: &pb.ProcessingResponse_RequestBody{RequestBody: response}}); err != nil {
			return err
		}
		if body = body[size:]; len(body) == 0 {
			return nil
		}
	}
}

func (s *server) routeResponse() *pb.ProcessingResponse {
	return &pb.ProcessingResponse{Response: &pb.ProcessingResponse_RequestHeaders{RequestHeaders: &pb.HeadersResponse{
		Response: &pb.CommonResponse{ClearRouteCache: true, HeaderMutation: &pb.HeaderMutation{SetHeaders: []*core.HeaderValueOption{{
			Header: &core.HeaderValue{Key: "x-gateway-destination-endpoint", RawValue: s.destination},
		}}}},
	}}}
}

func bodyResponse(data []byte, last bool) *pb.BodyResponse {
	return &pb.BodyResponse{Response: &pb.CommonResponse{BodyMutation: &pb.BodyMutation{Mutation: &pb.BodyMutation_StreamedResponse{
		StreamedResponse: &pb.StreamedBodyResponse{Body: data, EndOfStream: last},
	}}}}
}

func main() {
	port := flag.Int("port", 9002, "port on 127.0.0.1")
	destination := flag.String("destination", "127.0.0.1:8000", "endpoint of every answer")
	flag.Parse()
	listener, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", *port))
	if err != nil {
		panic(err)
	}
	processor := grpc.NewServer()
	pb.RegisterExternalProcessorServer(processor, &server{destination: []byte(*destination)})
	if err := processor.Serve(listener); err != nil {
		panic(err)
	}
}
