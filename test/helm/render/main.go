// Command render prints what a kustomization of deploy/ makes, with another image: what kubectl apply -f takes.
//
//	go run ./render FOLDER REGISTRY/NAME@DIGEST
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("got %q; usage: render FOLDER REGISTRY/NAME@DIGEST", args)
	}
	name, digest, ok := strings.Cut(args[1], "@")
	if !ok {
		return fmt.Errorf("%q names no digest", args[1])
	}
	folder, err := filepath.Abs(args[0])
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(filepath.Dir(folder), ".release") // kustomize takes no absolute paths, and go list looks into no such folder
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	text := fmt.Sprintf("apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../%s]\nimages: [{name: kproxy, newName: %q, digest: %q}]\n", filepath.Base(folder), name, digest)
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o644); err != nil {
		return err
	}
	objects, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		return err
	}
	out, err := objects.AsYaml()
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(out)
	return err
}
