package web

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"hash/crc32"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// message is a piece of an event stream, as it is and compressed. All streams
// share it: a DEFLATE block that refers to nothing before it and ends on a byte
// boundary may follow any other such block (RFC 1951, sections 2 and 3.2.4), so
// the work isn't done for each of them.
type message struct {
	plain, deflated []byte
}

// packer makes messages. It is not safe for concurrent use.
type packer struct {
	buffer bytes.Buffer
	writer *flate.Writer
}

func (p *packer) pack(plain []byte) *message {
	p.buffer.Reset()
	if p.writer == nil {
		p.writer, _ = flate.NewWriter(&p.buffer, flate.BestSpeed) // fails only for levels there aren't
	} else {
		p.writer.Reset(&p.buffer)
	}
	_, _ = p.writer.Write(plain) // to memory: doesn't fail
	_ = p.writer.Flush()
	return &message{plain: plain, deflated: bytes.Clone(p.buffer.Bytes())}
}

// gzipHeader begins a gzip file with no name and no time, of an unknown system (RFC
// 1952, section 2.3).
var gzipHeader = []byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255}

// gzipStream writes messages as one gzip file.
type gzipStream struct {
	w    io.Writer
	crc  uint32
	size uint32 // modulo 2^32, as the format wants it
}

func (g *gzipStream) write(m *message) error {
	g.crc = crc32.Update(g.crc, crc32.IEEETable, m.plain)
	g.size += uint32(len(m.plain))
	_, err := g.w.Write(m.deflated)
	return err
}

// end writes an empty last block and the trailer.
func (g *gzipStream) end() error {
	b := binary.LittleEndian.AppendUint32([]byte{1, 0, 0, 0xff, 0xff}, g.crc)
	_, err := g.w.Write(binary.LittleEndian.AppendUint32(b, g.size))
	return err
}

// acceptsGzip reports whether r's client takes gzip (RFC 9110, section 12.5.3): what
// it says of gzip by name counts, wherever that stands, before what it says of any.
func acceptsGzip(r *http.Request) bool {
	takes := false
	for part := range strings.SplitSeq(r.Header.Get("Accept-Encoding"), ",") {
		coding, weight, _ := strings.Cut(part, ";")
		switch strings.ToLower(strings.TrimSpace(coding)) {
		case "gzip", "x-gzip":
			return weighsSomething(weight)
		case "*":
			takes = weighsSomething(weight)
		}
	}
	return takes
}

// weighsSomething reports whether the weight of a content coding isn't 0; it is 1
// where there is none.
func weighsSomething(weight string) bool {
	value, has := strings.CutPrefix(strings.ToLower(strings.TrimSpace(weight)), "q=")
	if !has {
		return true
	}
	q, err := strconv.ParseFloat(value, 64)
	return err == nil && q > 0
}
