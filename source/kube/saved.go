package kube

import (
	"archive/zip"
	"bytes"
	"cmp"
	"compress/flate"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
)

// The last state of the API is kept in a file, so that a kproxy that starts while the API
// server is away serves what it said last. The file is a zip archive, which has checksums: a
// JSON object that says whose state it is, and a list of each kind as the API itself encodes
// lists in protobuf. Of a later release's file, fields and members that aren't known are left out.

const (
	// saveEvery is the least time between two writes of the file, saveEveryMost the most after changes: between them a
	// pause is as long as what was written takes at saveRate bytes a second, so that a large state neither costs much nor
	// wears out a disk.
	saveEvery     = 10 * time.Second
	saveEveryMost = time.Minute
	saveRate      = 10_000
	// answerBound is how long an API server may take to say all there is before the saved state
	// is served: one that accepts connections may answer none.
	answerBound = 5 * time.Second
)

// Members of the archive.
const (
	originMember   = "origin.json"
	servicesMember = "services.pb"
	slicesMember   = "endpointslices.pb"
	nodesMember    = "nodes.pb"
	cidrsMember    = "servicecidrs.pb" // which files of earlier releases don't have
)

// origin says whose state a file holds, and as of when.
type origin struct {
	Server    string    `json:"server"`
	Authority string    `json:"certificateAuthority"` // SHA-256 of its certificates; empty without
	Node      string    `json:"node"`
	Time      time.Time `json:"time"`
}

// authorityOf tells clusters apart that are reached at one address.
func authorityOf(rc *rest.Config) string {
	certificates := rc.CAData
	if len(certificates) == 0 && rc.CAFile != "" {
		certificates, _ = os.ReadFile(rc.CAFile) // the client has read it
	}
	if len(certificates) == 0 {
		return ""
	}
	sum := sha256.Sum256(certificates)
	return hex.EncodeToString(sum[:])
}

// keepSaved writes the file after changes until ctx is done, also those heard just before the API went away.
// Without changes it renews the time in the file, while the API is there to confirm it.
func (s *Source) keepSaved(ctx context.Context) {
	if s.cfg.StateFile == "" {
		return
	}
	renewal := max(s.cfg.StateMaxAge/8, saveEvery)
	changed := false // since the last write
	for wait := renewal; ; {
		select {
		case <-ctx.Done():
			return
		case <-s.unsaved:
			changed = true
		case <-time.After(wait):
		}
		wait = saveEvery // to try again
		pause := saveEvery
		if s.heard.Load() && (changed || len(s.failing()) == 0) {
			size, err := s.save()
			s.noteSaved(err)
			if err == nil {
				changed, wait = false, renewal
				pause = pauseAfter(size)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// pauseAfter returns how long the next write waits after one of size bytes.
func pauseAfter(size int) time.Duration {
	return min(max(time.Duration(size)*(time.Second/saveRate), saveEvery), saveEveryMost)
}

// save returns how many bytes it wrote. What is saved is as of now, or of when a watch began to fail.
func (s *Source) save() (int, error) {
	from := s.origin()
	for _, h := range s.failing() {
		if at := h.failingSince(); at.Before(from.Time) {
			from.Time = at
		}
	}
	content, err := s.state.archive(from)
	if err != nil {
		return 0, err
	}
	return len(content), s.cfg.WriteFile(s.cfg.StateFile, content)
}

func (s *Source) origin() origin {
	return origin{Server: s.client.host, Authority: s.client.authority, Node: s.cfg.Node, Time: time.Now().UTC()}
}

// noteSaved says once that the file can't be written, and that it can be again.
func (s *Source) noteSaved(err error) {
	if err == nil {
		if s.saveProblem.Swap(nil) != nil {
			s.log.Info("the state of the API is saved again", "file", s.cfg.StateFile)
		}
		return
	}
	what := fmt.Sprintf("the state can't be saved, and a kproxy that starts while the API is away will serve nothing or an older one: %s", oneLine(err))
	if was := s.saveProblem.Swap(&what); was == nil {
		s.log.Warn("the state of the API can't be saved", "error", err)
	}
}

// restoreIfAway takes what there is from the file when the API turns out to be away.
// An API that refuses this client isn't away: its rights or credentials are wrong, and a rollout
// that brought them is to stop there.
func (s *Source) restoreIfAway(ctx context.Context) {
	if s.cfg.StateFile == "" {
		return
	}
	slow := time.After(s.answerBound)
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.failed:
		case <-slow:
		}
		if s.state.synced() {
			return
		}
		if slices.ContainsFunc(s.failing(), func(h *health) bool { return h.refused() }) {
			continue
		}
		at, err := s.restore()
		if err == nil {
			s.savedAt.Store(&at)
			s.log.Warn("the Kubernetes API doesn't answer; serving its state as saved", "server", s.client.host, "saved", at, "age", time.Since(at).Round(time.Second))
			s.state.wake()
		} else {
			what := "no saved state is served meanwhile: " + oneLine(err)
			s.saveProblem.Store(&what)
			s.log.Warn("the Kubernetes API doesn't answer, and no saved state can be served", "server", s.client.host, "reason", err)
		}
		return
	}
}

// restore fills tables that the API hasn't filled, and returns as of when.
func (s *Source) restore() (time.Time, error) {
	content, err := os.ReadFile(s.cfg.StateFile)
	if errors.Is(err, os.ErrNotExist) {
		return time.Time{}, fmt.Errorf("there is none in %s", s.cfg.StateFile)
	} else if err != nil {
		return time.Time{}, err
	}
	from, saved, err := readArchive(content)
	if err == nil {
		err = from.usable(s.origin(), s.cfg.StateMaxAge)
	}
	if err == nil {
		err = s.state.restore(saved)
	}
	if err != nil {
		return time.Time{}, fmt.Errorf("%s: %w", s.cfg.StateFile, err)
	}
	return from.Time, nil
}

// usable says what keeps a state from being served by who is now.
func (o origin) usable(now origin, maxAge time.Duration) error {
	age := now.Time.Sub(o.Time).Round(time.Second)
	switch {
	case o.Server != now.Server:
		return fmt.Errorf("it is of the API server %s, not of %s", o.Server, now.Server)
	case o.Authority != now.Authority:
		return errors.New("it is of a cluster with another certificate authority")
	case o.Node != now.Node:
		return fmt.Errorf("it is of the node %s, not of %s", o.Node, now.Node)
	case age > maxAge:
		return fmt.Errorf("it is %s old, and --state-max-age is %s", age, maxAge)
	case -age > maxAge:
		return fmt.Errorf("it is from %s, which this node's clock takes to be in %s", o.Time.Format(time.RFC3339), -age)
	}
	return nil
}

// savedObjects are the objects in a file.
type savedObjects struct {
	services corev1.ServiceList
	slices   discoveryv1.EndpointSliceList
	nodes    corev1.NodeList
	cidrs    networkingv1.ServiceCIDRList
}

// readArchive reads the content of a file.
func readArchive(content []byte) (from origin, o savedObjects, err error) {
	r, err := zip.NewReader(bytes.NewReader(content), int64(len(content)))
	if err != nil {
		return from, o, fmt.Errorf("it is damaged: %w", err)
	}
	for name, take := range map[string]func([]byte) error{
		originMember:   func(b []byte) error { return json.Unmarshal(b, &from) },
		servicesMember: o.services.Unmarshal,
		slicesMember:   o.slices.Unmarshal,
		nodesMember:    o.nodes.Unmarshal,
		cidrsMember:    o.cidrs.Unmarshal,
	} {
		var member []byte
		f, err := r.Open(name)
		if name == cidrsMember && errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			member, err = io.ReadAll(f) // checks the checksum
		}
		if err == nil {
			err = take(member)
		}
		if err != nil {
			return from, o, fmt.Errorf("it is damaged: %s: %w", name, err)
		}
	}
	return from, o, nil
}

// archive is the content of a file with everything in the tables.
func (s *state) archive(from origin) ([]byte, error) {
	text, err := json.Marshal(from)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	lists := []struct {
		name     string
		messages [][]byte
	}{{servicesMember, s.services.messages()}, {slicesMember, s.slices.messages()}, {nodesMember, s.nodes.messages()}, {cidrsMember, s.cidrs.messages()}}
	s.mu.Unlock()
	var out bytes.Buffer
	z := zip.NewWriter(&out)
	var deflate *flate.Writer // one for all members, which follow each other: it has room of its own
	z.RegisterCompressor(zip.Deflate, func(w io.Writer) (_ io.WriteCloser, err error) {
		if deflate == nil {
			deflate, err = flate.NewWriter(w, flate.BestSpeed)
		} else {
			deflate.Reset(w)
		}
		return deflate, err
	})
	w, err := z.Create(originMember)
	if err == nil {
		_, err = w.Write(text)
	}
	for _, l := range lists {
		if err == nil {
			w, err = z.Create(l.name)
		}
		if err == nil {
			err = writeList(w, l.messages)
		}
	}
	if err == nil {
		err = z.Close()
	}
	return out.Bytes(), err
}

// writeList writes objects as the API's list of them in protobuf, whose field items is number 2.
func writeList(w io.Writer, messages [][]byte) error {
	var head [1 + binary.MaxVarintLen64]byte
	for _, m := range messages {
		const items = 2<<3 | 2 // its number, and that its length comes first
		_, err := w.Write(binary.AppendUvarint(append(head[:0], items), uint64(len(m))))
		if err == nil {
			_, err = w.Write(m)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// messages are every object, by name. What they hold is never modified. The caller holds mu.
func (t *table[T]) messages() [][]byte {
	names := slices.AppendSeq(make([]name, 0, len(t.objects)), maps.Keys(t.objects))
	slices.SortFunc(names, func(a, b name) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	out := make([][]byte, len(names))
	for i, k := range names {
		out[i] = t.objects[k]
	}
	return out
}

// restore puts saved objects into the tables that the API hasn't filled meanwhile. They are to be
// converted once, although not all that the API says has been heard.
func (s *state) restore(o savedObjects) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	for i := range o.nodes.Items { // first: endpoints depend on it
		err = errors.Join(err, s.nodes.restore(&o.nodes.Items[i]))
	}
	for i := range o.cidrs.Items {
		err = errors.Join(err, s.cidrs.restore(&o.cidrs.Items[i]))
	}
	for i := range o.services.Items {
		err = errors.Join(err, s.services.restore(&o.services.Items[i]))
	}
	for i := range o.slices.Items {
		err = errors.Join(err, s.slices.restore(&o.slices.Items[i]))
	}
	s.restored = err == nil
	return err
}

// restore puts in a saved object. The caller holds mu.
func (t *table[T]) restore(o T) error {
	if t.synced {
		return nil
	}
	c, err := t.collect(o)
	if err == nil {
		t.put(c)
	}
	return err
}

// takeRestored reports, once, whether there is a saved state to convert. Afterwards what is there is part old
// and part new until the API has said all.
func (s *state) takeRestored() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.restored
	s.restored = false
	return was
}

// failingSince is since when it fails, or failed last.
func (h *health) failingSince() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.since.UTC()
}

// refused reports whether the API server answers, but not to this client.
func (h *health) refused() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.during != "" && (apierrors.IsUnauthorized(h.err) || apierrors.IsForbidden(h.err))
}
