package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/bugreport"
	"kproxy.dev/kproxy/cmd/kproxy/cluster"
)

// clusterReport writes one archive of the reports of nodes. A node that has none has the reason in it, and what the API server
// keeps of its pod's log.
func clusterReport(c *cli.Context) error {
	if !c.IsSet("timeout") {
		if err := c.Set("timeout", (2 * reportTime).String()); err != nil {
			return err
		}
	}
	k, nodes, _, err := openCluster(c, 0, 0)
	if err != nil {
		return err
	}
	words := []string{"bugreport", "--output", "-"}
	if c.Bool("mask") {
		words = append(words, "--mask-key", rand.Text())
	}
	answers := cluster.Ask(c.Context, k, nodes, func(ctx context.Context, n cluster.Node) (string, error) { return k.Exec(ctx, n, words...) })
	name := c.String("output")
	if name == "" {
		name = "kproxy-bugreport-" + time.Now().UTC().Format("20060102T150405Z") + ".tar.gz"
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return flagError("output", err)
	}
	z := gzip.NewWriter(f)
	t := tar.NewWriter(z)
	for _, a := range answers {
		if a.Trouble == nil {
			err = errors.Join(err, copyReport(t, a.Value))
		} else if !c.Bool("mask") { // what there is instead isn't masked
			text := k.LastWords(c.Context, a.Node)
			err = errors.Join(err, addFile(t, a.Node.Name+"-no-report.txt", bugreport.WithoutSecrets([]byte(a.Trouble.Error()+"\n\n"+text))))
		}
	}
	if err = errors.Join(err, t.Close(), z.Close(), f.Close()); err != nil {
		return fmt.Errorf("write the reports: %w", err)
	}
	fmt.Fprintf(c.App.Writer, "%s: %d nodes; unpack it and open the index.html of each\n", name, len(nodes))
	return troubled(c.App.ErrWriter, answers)
}

// copyReport copies the files of a node's report.
func copyReport(to *tar.Writer, report string) error {
	z, err := gzip.NewReader(strings.NewReader(report))
	if err != nil {
		return err
	}
	for from := tar.NewReader(z); ; {
		h, err := from.Next()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := to.WriteHeader(h); err != nil {
			return err
		}
		if _, err := io.Copy(to, from); err != nil {
			return err
		}
	}
}

func addFile(to *tar.Writer, name string, content []byte) error {
	err := to.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: int64(len(content)), ModTime: time.Now()})
	if err == nil {
		_, err = io.Copy(to, bytes.NewReader(content))
	}
	return err
}
