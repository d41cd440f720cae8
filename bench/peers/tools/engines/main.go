// engines is every engine of the comparison in one process, as cheap as possible.
//
// It listens on one port of 127.0.0.1 to 127.0.0.100, so each address is an engine of its own. A POST
// gets a constant answer, or with the header x-stream a stream of events; GET /metrics gets a captured
// page of vLLM in which a dozen values change at every scrape, so that no picker can skip a page as
// unchanged; GET /counts on any address returns requests and scrapes by address and resets them;
// every other GET lists one model.
package main

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	model        = "demo"
	numEngines   = 100
	valueWidth   = 14
	streamEvents = 50
	streamPause  = 2 * time.Millisecond
)

type engine struct{ requests, scrapes, open, tokens atomic.Int64 }

// A value on the metrics page that changes, of fixed width.
type value struct {
	offset int
	metric string
}

var (
	engines    sync.Map // address -> *engine
	page       []byte
	values     []value
	completion = response("application/json", []byte(`{"id":"chatcmpl-1","object":"chat.completion","created":1790000000,"model":"`+model+`","choices":[{"index":0,"message":{"role":"assistant","content":"The quick brown fox jumps over the lazy dog and runs on through the meadow until the evening."},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":500,"total_tokens":516,"completion_tokens":16,"prompt_tokens_details":{"cached_tokens":256}}}`))
	models     = response("application/json", []byte(`{"object":"list","data":[{"id":"`+model+`","object":"model","created":1790000000,"owned_by":"vllm","root":"`+model+`","parent":null,"max_model_len":131072}]}`))
)

var changing = map[string]func(e *engine) (number float64, decimals int){
	"vllm:num_requests_running":              func(e *engine) (float64, int) { return float64(e.open.Load()), 1 },
	"vllm:num_requests_waiting":              func(*engine) (float64, int) { return 0, 1 },
	"vllm:kv_cache_usage_perc":               func(e *engine) (float64, int) { return 0.2 + float64(e.scrapes.Load()%7)/1000, 6 },
	"vllm:prompt_tokens_total":               tokens,
	"vllm:generation_tokens_total":           tokens,
	"vllm:prefix_cache_queries_total":        tokens,
	"vllm:prefix_cache_hits_total":           func(e *engine) (float64, int) { return float64(e.tokens.Load()) / 2, 1 },
	"vllm:request_success_total":             requests,
	"vllm:iteration_tokens_total_sum":        tokens,
	"vllm:iteration_tokens_total_count":      requests,
	"vllm:time_to_first_token_seconds_count": requests,
}

func tokens(e *engine) (float64, int) { return float64(e.tokens.Load() + e.scrapes.Load()), 1 }

func requests(e *engine) (float64, int) { return float64(e.requests.Load()), 1 }

func response(contentType string, body []byte) []byte {
	head := fmt.Sprintf("HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n", contentType, len(body))
	return append([]byte(head), body...)
}

func loadPage(path string) {
	captured, err := os.ReadFile(path)
	if err != nil {
		panic(err)
	}
	// A cache of 432,000 tokens in place of the 8,192 of the machine that the page was captured on.
	text := strings.ReplaceAll(string(captured), `num_gpu_blocks="256"`, `num_gpu_blocks="27000"`)
	text = strings.ReplaceAll(text, `,block_size="32"`, `,block_size="16"`)
	text = strings.ReplaceAll(text, `kv_cache_size_tokens="8192"`, `kv_cache_size_tokens="432000"`)
	text = regexp.MustCompile(`model_name="[^"]*"`).ReplaceAllString(text, `model_name="`+model+`"`)
	var out bytes.Buffer
	for _, line := range strings.SplitAfter(text, "\n") {
		metric := line
		if at := strings.IndexAny(line, "{ "); at >= 0 {
			metric = line[:at]
		}
		space := strings.LastIndexByte(strings.TrimRight(line, "\n"), ' ')
		if changing[metric] == nil || space < 0 {
			out.WriteString(line)
			continue
		}
		out.WriteString(line[:space+1])
		values = append(values, value{out.Len(), metric})
		out.WriteString(strings.Repeat("0", valueWidth) + "\n")
	}
	page = response("text/plain; version=0.0.4; charset=utf-8", out.Bytes())
	for at := range values {
		values[at].offset += len(page) - out.Len()
	}
}

func renderPage(e *engine, scratch []byte) []byte {
	e.scrapes.Add(1)
	scratch = append(scratch[:0], page...)
	for _, value := range values {
		number, decimals := changing[value.metric](e)
		text := strconv.AppendFloat(make([]byte, 0, 24), number, 'f', decimals, 64)
		copy(scratch[value.offset+valueWidth-len(text):], text)
	}
	return scratch
}

func renderCounts() []byte {
	var out bytes.Buffer
	engines.Range(func(address, entry any) bool {
		e := entry.(*engine)
		fmt.Fprintf(&out, "%s %d %d\n", address, e.requests.Swap(0), e.scrapes.Swap(0))
		return true
	})
	return response("text/plain", out.Bytes())
}

type request struct {
	path                     string
	isPost, isChunked, wants bool
	length                   int
}

func readRequest(in *bufio.Reader) (request, error) {
	var r request
	line, err := in.ReadSlice('\n')
	if err != nil {
		return r, err
	}
	if parts := bytes.SplitN(line, []byte(" "), 3); len(parts) > 1 {
		r.path = string(parts[1])
	}
	r.isPost = line[0] == 'P'
	for {
		if line, err = in.ReadSlice('\n'); err != nil {
			return r, err
		}
		name, text, _ := strings.Cut(strings.TrimSpace(string(line)), ":")
		if name == "" {
			break
		}
		switch strings.ToLower(name) {
		case "content-length":
			r.length, _ = strconv.Atoi(strings.TrimSpace(text))
		case "transfer-encoding":
			r.isChunked = true
		case "x-stream":
			r.wants = true
		}
	}
	if r.isChunked {
		r.length, err = discardChunks(in)
	} else {
		_, err = io.CopyN(io.Discard, in, int64(r.length))
	}
	return r, err
}

func discardChunks(in *bufio.Reader) (int, error) {
	total := 0
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return 0, err
		}
		size, err := strconv.ParseInt(strings.TrimSpace(string(line)), 16, 64)
		if err != nil {
			return 0, err
		}
		if _, err := in.Discard(int(size) + 2); err != nil {
			return 0, err
		}
		if total += int(size); size == 0 {
			return total, nil
		}
	}
}

func serve(conn net.Conn, e *engine) {
	defer conn.Close()
	in := bufio.NewReaderSize(conn, 65536)
	var scratch []byte
	for {
		r, err := readRequest(in)
		if err != nil {
			return
		}
		switch {
		case r.isPost:
			e.requests.Add(1)
			e.tokens.Add(int64(r.length / 4))
			e.open.Add(1)
			if r.wants {
				err = sendStream(conn)
			} else {
				_, err = conn.Write(completion)
			}
			e.open.Add(-1)
		case r.path == "/metrics":
			scratch = renderPage(e, scratch)
			_, err = conn.Write(scratch)
		case r.path == "/counts":
			_, err = conn.Write(renderCounts())
		default:
			_, err = conn.Write(models)
		}
		if err != nil {
			return
		}
	}
}

func sendStream(conn net.Conn) error {
	if _, err := conn.Write([]byte("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")); err != nil {
		return err
	}
	event := `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"` + model + `","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}` + "\n\n"
	chunk := []byte(fmt.Sprintf("%x\r\n%s\r\n", len(event), event))
	for range streamEvents {
		time.Sleep(streamPause)
		if _, err := conn.Write(chunk); err != nil {
			return err
		}
	}
	_, err := conn.Write([]byte("e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"))
	return err
}

func main() {
	port := flag.Int("port", 8000, "port on every address")
	path := flag.String("page", "", "captured metrics page")
	flag.Parse()
	loadPage(*path)
	var all sync.WaitGroup
	for number := 1; number <= numEngines; number++ {
		address := fmt.Sprintf("127.0.0.%d", number)
		listener, err := net.Listen("tcp4", fmt.Sprintf("%s:%d", address, *port))
		if err != nil {
			panic(err)
		}
		e := &engine{}
		engines.Store(address, e)
		all.Go(func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				go serve(conn, e)
			}
		})
	}
	all.Wait()
}
