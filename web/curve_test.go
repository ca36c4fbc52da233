package web

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
)

func TestCurve(t *testing.T) {
	r := NewRecorder(RecorderConfig{Source: &fakeSource{}})
	at := func(seconds int) time.Time { return time.Unix(1_800_000_000+int64(seconds), 0) }
	count := func(total, failed, retried uint64) plan.Connections {
		return plan.Connections{Total: total, Failed: failed, Retried: retried}
	}
	r.curve.add(at(0), at(10), plan.Userspace, count(5, 0, 0), count(25, 0, 10))
	r.curve.add(at(5), at(25), plan.NFTables, count(0, 0, 0), count(40, 0, 0)) // a quarter, a half, a quarter
	r.curve.add(at(25), at(30), plan.NFTables, count(40, 0, 0), count(40, 30, 0))
	r.curve.add(at(25), at(30), plan.NFTables, count(100, 0, 0), count(3, 0, 0)) // a new service port: nothing is known
	got := r.Curve(at(30), 40*time.Second)
	want := Curve{StepSeconds: 10, Begin: at(-10).UTC(), Planes: map[plan.DataPlane]CurvePlane{
		plan.Userspace: {New: []float64{0, 2, 0, 0}, Failed: []float64{0, 0, 0, 0}, Retried: []float64{0, 1, 0, 0}},
		plan.NFTables:  {New: []float64{0, 1, 2, 4}, Failed: []float64{0, 0, 0, 3}, Retried: []float64{0, 0, 0, 0}},
	}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	r.curve.add(at(30), at(32), plan.NFTables, count(40, 30, 0), count(46, 30, 0))
	if d := cmp.Diff(want, r.Curve(at(38), 40*time.Second)); d != "" {
		t.Errorf("while the next step isn't over (-want +got):\n%s", d)
	}
	hours := r.Curve(at(140), curveSpan)
	if n := len(hours.Planes[plan.NFTables].New); n != curveMost || hours.StepSeconds != 120 {
		t.Errorf("six hours are %d steps of %g s", n, hours.StepSeconds)
	}
	if later := r.Curve(at(200).Add(curveSpan), curveSpan); len(later.Planes) != 0 {
		t.Errorf("six hours later it is still there: %v", later.Planes)
	}
}
