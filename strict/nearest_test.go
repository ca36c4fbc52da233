package strict

import "testing"

func TestNearest(t *testing.T) {
	kinds := []string{"Service", "EndpointSlice", "Endpoints", "Node", "List"}
	for word, want := range map[string]string{
		"Servce": "Service", "service": "Service", "Svc": "", "Services": "Service", "Endpoint": "Endpoints", "EndpointSlcie": "EndpointSlice",
		"Pod": "", "Deployment": "", "Secret": "", "ServiceAccount": "", "ConfigMap": "", "Nod": "Node", "Lisst": "List", "": "",
		"Ingress": "", "Noed": "Node",
	} {
		if got := Nearest(word, kinds...); got != want {
			t.Errorf("%q is nearest to %q, want %q", word, got, want)
		}
	}
	if got := Nearest("stauts", "run", "status", "trace"); got != "status" {
		t.Errorf("stauts: %q", got)
	}
	if got := DidYouMean("Servce", kinds...) + DidYouMean("Pod", kinds...); got != ", did you mean Service?" {
		t.Errorf("the message is %q", got)
	}
}
