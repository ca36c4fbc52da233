package plan

import "testing"

func TestHealthOfUserspace(t *testing.T) {
	for _, tt := range []struct {
		status Status
		want   string
	}{
		{Status{}, "NOT SERVING"},
		{Status{Alive: true}, "alive"},
		{Status{Alive: true, Exhausted: []Resource{Descriptors}}, "EXHAUSTED: descriptors"},
		{Status{Alive: true, Exhausted: []Resource{Sessions, Memory}}, "EXHAUSTED: sessions, memory"},
		{Status{Exhausted: []Resource{Sessions}}, "NOT SERVING"},
	} {
		if got := tt.status.Health(); got != tt.want {
			t.Errorf("%+v is %q, want %q", tt.status, got, tt.want)
		}
	}
}
