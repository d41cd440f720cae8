// load sends chat completions over keep-alive connections, in a closed loop or at a rate (Poisson
// arrivals), and prints one line of JSON.
//
// Bodies have exactly -size bytes. Of four requests three begin with the first three quarters of one
// of 16 prompts and end in a tail of their own; the fourth is new from its first word. Latency counts
// from when a request was due (rate) or sent (closed loop) to the last byte of its answer.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand"
	"net"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	mark         = "################"
	numPrompts   = 16
	notConnected = -1
	brokenOff    = -2
)

var (
	address  = flag.String("address", "127.0.0.1:8080", "Envoy's listener")
	numConns = flag.Int("connections", 1, "connections")
	rate     = flag.Float64("rate", 0, "requests per second; 0 is a closed loop")
	seconds  = flag.Float64("seconds", 2, "duration")
	size     = flag.Int("size", 2000, "bytes of a body")
	endpoint = flag.String("endpoint", "", "endpoint to name, where no picker does")
	seed     = flag.Int64("seed", 1, "start of all chance")
	stream   = flag.Bool("stream", false, "ask for a streamed answer")
)

// template returns a request and the offsets of its two marks, at the start of the shared and of the
// unique part.
func template() (request []byte, shared, unique int) {
	head := `{"model":"demo","messages":[{"role":"system","content":"` + mark + ` `
	middle := `"},{"role":"user","content":"` + mark + ` `
	tail := `"}],"max_tokens":16,"temperature":0.7}`
	room := max(2, *size-len(head)-len(middle)-len(tail))
	words := strings.Fields("alpha river stone cloud window bright seven market green letter engine paper north signal orange quiet number garden silver table question answer summer winter")
	random := rand.New(rand.NewSource(7))
	var text bytes.Buffer
	for text.Len() < room {
		text.WriteString(words[random.Intn(len(words))] + " ")
	}
	border := room * 3 / 4
	body := head + text.String()[:border] + middle + text.String()[border:room] + tail
	headers := "POST /v1/chat/completions HTTP/1.1\r\nhost: inference.example\r\nuser-agent: load\r\naccept: */*\r\ncontent-type: application/json\r\n"
	if *endpoint != "" {
		headers += "x-gateway-destination-endpoint: " + *endpoint + "\r\n"
	}
	if *stream {
		headers += "x-stream: 1\r\n"
	}
	all := headers + fmt.Sprintf("content-length: %d\r\n\r\n", len(body)) + body
	shared = strings.Index(all, mark)
	unique = shared + len(mark) + strings.Index(all[shared+len(mark):], mark)
	return []byte(all), shared, unique
}

func readAnswer(in *bufio.Reader) (int, error) {
	line, err := in.ReadSlice('\n')
	if err != nil {
		return 0, err
	}
	status, _ := strconv.Atoi(string(line[9:12]))
	length, isChunked := 0, false
	for {
		if line, err = in.ReadSlice('\n'); err != nil {
			return 0, err
		}
		name, text, _ := strings.Cut(strings.TrimSpace(string(line)), ":")
		if name == "" {
			break
		}
		switch strings.ToLower(name) {
		case "content-length":
			length, _ = strconv.Atoi(strings.TrimSpace(text))
		case "transfer-encoding":
			isChunked = true
		}
	}
	if !isChunked {
		_, err = io.CopyN(io.Discard, in, int64(length))
		return status, err
	}
	for {
		if line, err = in.ReadSlice('\n'); err != nil {
			return 0, err
		}
		length, err := strconv.ParseInt(strings.TrimSpace(string(line)), 16, 64)
		if err != nil {
			return 0, err
		}
		if _, err := in.Discard(int(length) + 2); err != nil {
			return 0, err
		}
		if length == 0 {
			return status, nil
		}
	}
}

// arrivals sends the time at which each request is due, until the end.
func arrivals(start, end time.Time) <-chan time.Time {
	due := make(chan time.Time, 100000)
	go func() {
		random := rand.New(rand.NewSource(*seed))
		at := start
		for {
			at = at.Add(time.Duration(random.ExpFloat64() / *rate * float64(time.Second)))
			if at.After(end) {
				close(due)
				return
			}
			time.Sleep(time.Until(at))
			due <- at
		}
	}()
	return due
}

type connection struct {
	number  int
	codes   map[int]int
	samples []time.Duration
}

func (c *connection) run(due <-chan time.Time, end time.Time) {
	request, shared, unique := template()
	random := rand.New(rand.NewSource(*seed*1000 + int64(c.number)))
	var conn net.Conn
	var in *bufio.Reader
	for number := 0; ; number++ {
		at := time.Now()
		if due != nil {
			var ok bool
			if at, ok = <-due; !ok {
				break
			}
		} else if at.After(end) {
			break
		}
		text := fmt.Sprintf("%08x%04x%04x", uint32(*seed), uint16(c.number), uint16(number))
		copy(request[unique:], text)
		if random.Intn(4) != 0 {
			text = fmt.Sprintf("group%011d", random.Intn(numPrompts))
		}
		copy(request[shared:], text)
		if conn == nil {
			var err error
			if conn, err = net.Dial("tcp", *address); err != nil {
				c.codes[notConnected]++
				conn = nil
				time.Sleep(10 * time.Millisecond)
				continue
			}
			in = bufio.NewReaderSize(conn, 65536)
		}
		_, err := conn.Write(request)
		status := 0
		if err == nil {
			status, err = readAnswer(in)
		}
		if err != nil {
			c.codes[brokenOff]++
			conn.Close()
			conn = nil
			continue
		}
		c.codes[status]++
		c.samples = append(c.samples, time.Since(at))
	}
	if conn != nil {
		conn.Close()
	}
}

func main() {
	flag.Parse()
	var due <-chan time.Time
	start := time.Now()
	end := start.Add(time.Duration(*seconds * float64(time.Second)))
	if *rate > 0 {
		due = arrivals(start, end)
	}
	connections := make([]*connection, *numConns)
	var running sync.WaitGroup
	for number := range connections {
		c := &connection{number: number, codes: map[int]int{}}
		connections[number] = c
		running.Go(func() { c.run(due, end) })
	}
	running.Wait()
	elapsed := time.Since(start).Seconds()
	var samples []time.Duration
	codes := map[string]int{}
	for _, c := range connections {
		samples = append(samples, c.samples...)
		for code, count := range c.codes {
			codes[strconv.Itoa(code)] += count
		}
	}
	sort.Slice(samples, func(i, j int) bool { return samples[i] < samples[j] })
	percentile := func(share float64) float64 {
		if len(samples) == 0 {
			return 0
		}
		return float64(samples[int(share*float64(len(samples)-1))]) / 1e6
	}
	json.NewEncoder(os.Stdout).Encode(map[string]any{
		"requests": len(samples), "codes": codes, "rps": float64(len(samples)) / elapsed,
		"p50_ms": percentile(.5), "p99_ms": percentile(.99),
	})
}
