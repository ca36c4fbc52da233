package flows

import (
	"slices"
	"strings"
	"testing"

	"kproxy.dev/kproxy/lab"
)

func load(t *testing.T) *Matrix {
	t.Helper()
	m, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestMatrixIsComplete: there is one row for whatever is tried, everything in the
// tables is tried, and nothing of what the matrix is made of is left out.
func TestMatrixIsComplete(t *testing.T) {
	m := load(t)
	rows, sets := map[*Row]bool{}, map[*EndpointSet]bool{}
	type combination struct {
		from     From
		kind     Kind
		policy   Policy
		set      string
		detector bool
		all      bool
	}
	seen := map[combination]bool{}
	topologies, hosts := map[lab.Topology]bool{}, map[Host]bool{}
	for _, c := range m.Configurations {
		topologies[c.Topology] = true
		for _, h := range c.Hosts {
			hosts[h] = true
		}
		flows, err := m.Flows(c)
		if err != nil {
			t.Fatal(err)
		}
		for i := range flows {
			f := &flows[i]
			rows[f.Row], sets[f.Service.Endpoints] = true, true
			seen[combination{f.From, f.Kind, f.Row.Policy, f.Service.Endpoints.Name, c.Detector != NoDetector, c.MasqueradeAll}] = true
		}
	}
	for _, special := range specials {
		if !slices.ContainsFunc(m.Services, func(s Service) bool { return s.Special == special }) {
			t.Errorf("no service has %s", special)
		}
	}
	for _, l := range lab.Topologies {
		if !topologies[l] {
			t.Errorf("nothing is tried on topology %s", l)
		}
	}
	if len(hosts) != len(knownHosts) || len(m.Hosts) != len(knownHosts) {
		t.Errorf("of hosts %v, %v are described and %v are tried", knownHosts, m.Hosts, hosts)
	}
	for i := range m.Rows {
		if !rows[&m.Rows[i]] {
			t.Errorf("the row in line %d of flows is never tried", m.Rows[i].Line)
		}
	}
	for i := range m.EndpointSets {
		if !sets[&m.EndpointSets[i]] {
			t.Errorf("endpoints %s are never tried", m.EndpointSets[i].Name)
		}
	}
	for _, kind := range Kinds {
		for _, from := range Froms {
			for _, policy := range []Policy{Cluster, Local} {
				for _, set := range []string{"everywhere", "elsewhere", "none"} {
					for _, b := range []combination{{}, {detector: true}, {all: true}, {detector: true, all: true}} {
						c := combination{from, kind, policy, set, b.detector, b.all}
						if !seen[c] && (from != Localhost || kind == NodePort) {
							t.Errorf("nothing is tried for %+v", c)
						}
					}
				}
			}
		}
	}
}

// TestNamesAreUnique, and every service can have an address.
func TestNamesAreUnique(t *testing.T) {
	m := load(t)
	var names []string
	for _, s := range m.Services {
		names = append(names, "service "+s.Name)
	}
	for _, s := range m.EndpointSets {
		names = append(names, "endpoints "+s.Name)
	}
	for _, c := range m.Configurations {
		names = append(names, "configuration "+c.Name)
	}
	slices.Sort(names)
	for i := 1; i < len(names); i++ {
		if names[i] == names[i-1] {
			t.Errorf("there are two: %s", names[i])
		}
	}
	if n := len(m.Services); n > 254 {
		t.Errorf("%d services are more than there are addresses", n)
	}
}

// TestParseSaysWhatIsWrong, and where.
func TestParseSaysWhatIsWrong(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"section", "-- wishes --\n", `section "wishes" isn't known`},
		{"columns", "-- configurations --\na none\n", "configurations, line 1: 2 columns, want 6"},
		{"topology", "-- configurations --\na ring none no all -\n", `configurations, line 1: topology "ring" isn't known`},
		{"nowhere", "-- nowhere --\nno-service refuse\nnobody drop\nother-port serve\n", "nowhere, line 2: nothing is called \"nobody\"\nnowhere, line 3: \"serve\" is neither refuse nor drop"},
		{"node ports", "-- configurations --\na routed none no some -\n", `configurations, line 1: node-ports is "some", want all or own`},
		{"host", "-- configurations --\na routed none no all strict,haunted\n", `configurations, line 1: host "haunted" isn't known`},
		{"detector", "-- configurations --\n\na routed magic no all -\n", `configurations, line 2: detector "magic" isn't known`},
		{"condition", "-- endpoints --\na sleepy - - | refuse | refuse\n", `endpoints, line 1: condition "sleepy" isn't known`},
		{"no such endpoint", "-- endpoints --\na ready - - | there | here\n", "there serves, but doesn't exist"},
		{"no such set", "-- services --\na Cluster Local b everyone - *\n", `endpoints "b" aren't in their table`},
		{"special", "-- services --\na Cluster Local b everyone magic *\n", `nothing special is called "magic"`},
		{"policy", "-- services --\na Cluster Nowhere b everyone - *\n", `policy "Nowhere" is neither`},
		{"cell", "-- flows --\ncluster-ip Local * - - - local/both\n", `cell "local/both" is neither`},
		{"configuration", "-- flows --\ncluster-ip Local wild - - - -\n", `configuration "wild" isn't in its table`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Parse([]byte(c.in))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got error %v, want one with %q", err, c.want)
			}
		})
	}
}
