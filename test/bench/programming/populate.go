package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"golang.org/x/sync/errgroup"
)

// writers is how many requests the API server gets at a time.
const writers = 16

// loadData puts kept data of etcd with w's objects into the cluster's folder, and
// reports whether there was any.
func loadData(ctx context.Context, c *cluster, kept string) (bool, error) {
	if _, err := os.Stat(kept); err != nil {
		return false, nil
	}
	now := time.Now()
	return true, errors.Join(os.Chtimes(kept, now, now), copyTree(ctx, kept, c.data()))
}

// keepData stops etcd for a moment and keeps its data.
func keepData(ctx context.Context, c *cluster, kept string) error {
	if err := c.stop(); err != nil {
		return err
	}
	partly, err := os.MkdirTemp(filepath.Dir(kept), "new.")
	if err != nil {
		return fmt.Errorf("keep data: %w", err)
	}
	defer os.RemoveAll(partly)
	if err := copyTree(ctx, c.data(), filepath.Join(partly, "etcd")); err != nil {
		return err
	}
	// Who was first has written the same.
	if err := os.Rename(filepath.Join(partly, "etcd"), kept); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("keep data: %w", err)
	}
	return c.start(ctx)
}

func copyTree(ctx context.Context, from, to string) error {
	if out, err := exec.CommandContext(ctx, "cp", "-a", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("copy %s: %w: %s", from, err, out)
	}
	return nil
}

// populate writes every object.
func (c *cluster) populate(ctx context.Context, w world, nodeAddresses []netip.Addr) error {
	if err := c.awaitNamespace(ctx); err != nil {
		return err
	}
	n := node(nodeAddresses)
	made, err := c.core.Nodes().Create(ctx, n, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create node: %w", err)
	}
	made.Status = n.Status
	if _, err := c.core.Nodes().UpdateStatus(ctx, made, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("update node: %w", err)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	for i := range w.services {
		g.Go(func() error {
			if _, err := c.core.Services(namespace).Create(ctx, w.service(i), metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("create service %s: %w", serviceName(i), err)
			}
			if _, err := c.discovery.EndpointSlices(namespace).Create(ctx, w.slice(i, 0), metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("create slice %s: %w", serviceName(i), err)
			}
			return nil
		})
	}
	return g.Wait()
}

// awaitNamespace waits until the API server has made what a new cluster has.
func (c *cluster) awaitNamespace(ctx context.Context) error {
	for {
		_, err := c.core.Namespaces().Get(ctx, namespace, metav1.GetOptions{})
		if err == nil || !apierrors.IsNotFound(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// put writes an EndpointSlice over the one there is, whatever its version.
func (c *cluster) put(ctx context.Context, s *discoveryv1.EndpointSlice) (*discoveryv1.EndpointSlice, error) {
	return c.discovery.EndpointSlices(namespace).Update(ctx, s, metav1.UpdateOptions{})
}
