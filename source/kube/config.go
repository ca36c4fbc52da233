package kube

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Config says which API is followed, and how.
type Config struct {
	// Kubeconfig is a file, Master the URL of the API server, which wins over the
	// file's. With neither, and for the credentials of a Master alone, the service
	// account of the pod this runs in is used.
	Kubeconfig string
	Master     string
	// Access is the way to the API that was found before; nil for that by the above.
	Access *rest.Config
	Node   string // the node this kproxy runs on
	// NodeAddresses are this node's; empty for those of its Node object.
	NodeAddresses []netip.Addr

	QPS         float32 // requests a second; negative doesn't limit them
	Burst       int     // so many more at a time
	ContentType string  // that objects are asked for in
	UserAgent   string
	Logger      *slog.Logger // nil discards

	// StateFile is where the last state is saved, and taken from when the API is away at the
	// start, if it is no older than StateMaxAge; empty for none. WriteFile replaces a file, and
	// returns when it is on the disk.
	StateFile   string
	StateMaxAge time.Duration
	WriteFile   func(path string, content []byte) error
}

const (
	protobuf = "application/vnd.kubernetes.protobuf"
	asJSON   = "application/json"
)

// ConfigError is a configuration that says nothing usable of the API. Its text
// names the file and the flag.
type ConfigError struct{ Err error }

func (e *ConfigError) Error() string { return e.Err.Error() }
func (e *ConfigError) Unwrap() error { return e.Err }

func configError(format string, args ...any) error {
	return &ConfigError{fmt.Errorf(format, args...)}
}

// rest returns the configuration of client-go.
func (c Config) rest() (*rest.Config, error) {
	out, err := c.access()
	if err != nil {
		return nil, err
	}
	out.QPS, out.Burst, out.UserAgent = c.QPS, c.Burst, c.UserAgent
	out.ContentType = cmp.Or(c.ContentType, protobuf)
	if out.ContentType != asJSON {
		// Whatever stands between, a server may answer errors in JSON only.
		out.AcceptContentTypes = out.ContentType + "," + asJSON
	}
	out.WarningHandler = rest.NoWarnings{} // for authors of objects; kproxy only reads
	return out, nil
}

// access finds out where the API is and who kproxy is there.
func (c Config) access() (*rest.Config, error) {
	switch {
	case c.Access != nil:
		return rest.CopyConfig(c.Access), nil
	case c.Kubeconfig != "":
		return c.fromFile()
	}
	out, err := rest.InClusterConfig()
	if err != nil && c.Master != "" {
		return &rest.Config{Host: c.Master}, nil
	} else if err != nil {
		return nil, configError("use the service account of this pod: %w; name another way to the Kubernetes API with --kubeconfig FILE", err)
	}
	if c.Master != "" {
		out.Host = c.Master
	}
	return out, nil
}

func (c Config) fromFile() (*rest.Config, error) {
	rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: c.Kubeconfig}
	file, err := rules.Load()
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, configError("--kubeconfig: there is no file %s", c.Kubeconfig)
	case errors.Is(err, os.ErrPermission):
		return nil, configError("--kubeconfig: %s may not be read by this user", c.Kubeconfig)
	case err != nil:
		return nil, configError("--kubeconfig: read %s: %s", c.Kubeconfig, cause(err, c.Kubeconfig))
	}
	if lacks := whatLacks(file, c.Master); lacks != "" {
		return nil, configError("--kubeconfig: %s %s", c.Kubeconfig, lacks)
	}
	overrides := &clientcmd.ConfigOverrides{ClusterInfo: clientcmdapi.Cluster{Server: c.Master}}
	out, err := clientcmd.NewNonInteractiveClientConfig(*file, file.CurrentContext, overrides, rules).ClientConfig()
	if err != nil {
		return nil, configError("--kubeconfig: %s: %s", c.Kubeconfig, oneLine(err))
	}
	return out, nil
}

// whatLacks says what is missing between current-context and a cluster, which
// client-go sums up as "no configuration has been provided".
func whatLacks(file *clientcmdapi.Config, master string) string {
	current := file.Contexts[file.CurrentContext]
	switch {
	case master != "" && len(file.Contexts) == 0:
		return "" // the server is known, and no user has to be
	case len(file.Clusters) == 0:
		return "names no cluster; a kubeconfig has clusters, users, contexts and a current-context"
	case file.CurrentContext == "":
		return "has no current-context, which says which of its clusters is meant"
	case current == nil:
		return fmt.Sprintf("has no context %q, which its current-context names", file.CurrentContext)
	case file.Clusters[current.Cluster] == nil:
		return fmt.Sprintf("has no cluster %q, which its context %q names", current.Cluster, file.CurrentContext)
	case current.AuthInfo != "" && file.AuthInfos[current.AuthInfo] == nil: // client-go would go as anonymous
		return fmt.Sprintf("has no user %q, which its context %q names", current.AuthInfo, file.CurrentContext)
	}
	return ""
}

// cause leaves out client-go's introduction, which says again which file.
func cause(err error, file string) string {
	return strings.TrimPrefix(oneLine(err), fmt.Sprintf("error loading config file %q: ", file))
}

// oneLine returns err's text on one line.
func oneLine(err error) string {
	return strings.Join(strings.Fields(err.Error()), " ")
}
