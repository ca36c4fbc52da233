package ipvs

import (
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// DrainSlack is how many seconds longer entries of [kernel.SetDrain] live than
// their real server drains: an entry that went first would leave a real server
// behind that nobody knows to be draining, and kproxy may be down for a while.
const DrainSlack = 7 * 24 * 3600

// recordBases name the sets of the record.
var recordBases = [3]string{kernel.SetDrain, kernel.SetVIP, kernel.SetVirtual}

// Sets are the record of what is kproxy's, per family and sorted. They are
// Dynamic: the Backend keeps their entries in step with the objects.
func Sets() []kernel.Set {
	var out []kernel.Set
	for _, base := range recordBases {
		for _, f := range service.Families {
			out = append(out, recordSet(base, f))
		}
	}
	return out
}

// recordSet is the definition of one of Sets.
func recordSet(base string, f service.Family) kernel.Set {
	s := kernel.Set{Name: kernel.FamilySet(base, f), Family: f, Dynamic: true}
	switch base {
	case kernel.SetDrain:
		s.Type, s.Timeout = kernel.HashIPPortIP, DrainSlack // entries bring their own
	case kernel.SetVIP:
		s.Type = kernel.HashIP
	case kernel.SetVirtual:
		s.Type = kernel.HashIPPort
	}
	return s
}
