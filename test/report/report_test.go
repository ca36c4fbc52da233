package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReport(t *testing.T) {
	tests := []struct {
		name, in, want string
		failSkipped    bool
		ok             bool
	}{
		{
			name: "all pass",
			in: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"chatter\n"}
{"Action":"pass","Package":"p","Test":"TestA/sub"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"pass","Package":"p","Elapsed":1.25}`,
			want: "ok    p                                           1.2s\n2 passed, 0 failed, 0 skipped\n",
			ok:   true,
		},
		{
			name: "a test fails: its output, and the package isn't counted again",
			in: `{"Action":"output","Package":"p","Test":"TestA","Output":"a_test.go:1: got 1, want 2\n"}
{"Action":"fail","Package":"p","Test":"TestA"}
{"Action":"pass","Package":"p","Test":"TestB"}
{"Action":"fail","Package":"p","Elapsed":2}
{"Action":"fail","Package":"go test (unit)"}`,
			want: `FAIL  p TestA
a_test.go:1: got 1, want 2
FAIL  p                                           2.0s
failed: p TestA
1 passed, 1 failed, 0 skipped
`,
		},
		{
			name: "why a test failed is said again at the end, without its logs",
			in: `{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:1: got 1, want 2\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"        a: 1\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"    world_test.go:9: log:\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"        1\n        2\n        3\n        4\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"--- FAIL: TestA (0.00s)\n"}
{"Action":"fail","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p","Elapsed":2}`,
			want: `FAIL  p TestA
    a_test.go:1: got 1, want 2
        a: 1
    world_test.go:9: log:
        1
        2
        3
        4
--- FAIL: TestA (0.00s)
FAIL  p                                           2.0s
failed: p TestA
    a_test.go:1: got 1, want 2
        a: 1
    world_test.go:9: log:
        1
        2
nothing ran
0 passed, 1 failed, 0 skipped
`,
		},
		{
			name: "a package that crashes: what was said is that of a test which didn't end",
			in: `{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestB","Output":"=== RUN   TestB\n"}
{"Action":"output","Package":"p","Test":"TestB","Output":"panic: boom\n"}
{"Action":"output","Package":"p","Test":"TestB","Output":"\n"}
{"Action":"output","Package":"p","Test":"TestB","Output":"goroutine 8 [running]:\n"}
{"Action":"output","Package":"p","Output":"FAIL\tp\t0.006s\n"}
{"Action":"fail","Package":"p","Elapsed":0.006}`,
			want: `FAIL  p
p TestB didn't end:
=== RUN   TestB
panic: boom

goroutine 8 [running]:
FAIL	p	0.006s
failed: p
p TestB didn't end:
=== RUN   TestB
panic: boom
goroutine 8 [running]:
FAIL	p	0.006s
1 passed, 1 failed, 0 skipped
`,
		},
		{
			name: "a package that can't be built",
			in: `{"ImportPath":"p","Action":"build-output","Output":"p/a.go:1: undefined: x\n"}
{"ImportPath":"p","Action":"build-fail"}
{"Action":"output","Package":"p","Output":"FAIL\tp [build failed]\n"}
{"Action":"fail","Package":"p","FailedBuild":"p"}
{"Action":"pass","Package":"q","Test":"TestQ"}`,
			want: "p/a.go:1: undefined: x\nFAIL  p\nFAIL\tp [build failed]\nfailed: p\n1 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "go test that can't start",
			in: `{"Action":"pass","Package":"checks","Test":"vet"}
{"Action":"fail","Package":"go test (unit)"}`,
			want: "FAIL  go test (unit)\nfailed: go test (unit)\n1 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "skips are shown with why",
			in: `{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:1: needs root\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"--- SKIP: TestA (0.00s)\n"}
{"Action":"skip","Package":"p","Test":"TestA"}
{"Action":"pass","Package":"p","Test":"TestB"}
{"Action":"skip","Package":"nothing-to-test"}`,
			want: "SKIP  p TestA: a_test.go:1: needs root\n1 passed, 0 failed, 1 skipped\n",
			ok:   true,
		},
		{
			name: "skips fail in CI", failSkipped: true,
			in: `{"Action":"skip","Package":"p","Test":"TestA"}
{"Action":"pass","Package":"p","Test":"TestB"}`,
			want: `SKIP  p TestA: 
skipped tests count as failures here (KPROXY_CI): run as root, with all of test/setup.sh installed
1 passed, 0 failed, 1 skipped
`,
		},
		{
			name: "what is skipped here passes in the VM, and nothing is skipped there", failSkipped: true,
			in: `{"Action":"skip","Package":"p","Test":"TestA"}
{"Action":"skip","Package":"p","Test":"TestB"}
{"Action":"pass","Package":"p (vm)","Test":"TestA"}
{"Action":"skip","Package":"p (vm)","Test":"TestB"}`,
			want: `SKIP  p TestB: 
SKIP  p (vm) TestB: 
skipped tests count as failures here (KPROXY_CI): run as root, with all of test/setup.sh installed
1 passed, 0 failed, 2 skipped
`,
		},
		{
			name: "a test whose subtest fails isn't counted again",
			in: `{"Action":"fail","Package":"p","Test":"TestA/one"}
{"Action":"pass","Package":"p","Test":"TestA/two"}
{"Action":"fail","Package":"p","Test":"TestA"}`,
			want: "FAIL  p TestA/one\nFAIL  p TestA\nfailed: p TestA/one\n1 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "a benchmark that ran counts; its figures after one round mean nothing",
			in: `{"Action":"output","Package":"p","Test":"BenchmarkA","Output":"BenchmarkA-2 1 5 ns/op\n"}
{"Action":"bench","Package":"p","Test":"BenchmarkA"}`,
			want: "1 passed, 0 failed, 0 skipped\n",
			ok:   true,
		},
		{
			name: "what each stage took, and how busy the processors were, before what failed",
			in: `{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"stage","Package":"unit tests","Elapsed":61,"Busy":95}
{"Action":"stage","Package":"guest","Elapsed":7}`,
			want: "stage unit tests                                   61s, processors 95% busy\nstage guest                                         7s\n1 passed, 0 failed, 0 skipped\n",
			ok:   true,
		},
		{
			name: "the tests that took long, the longest first, without their parts",
			in: `{"Action":"pass","Package":"m/p","Test":"TestA","Elapsed":10}
{"Action":"pass","Package":"m/p","Test":"TestShort","Elapsed":9.9}
{"Action":"pass","Package":"m/q (vm)","Test":"TestB/part","Elapsed":70}
{"Action":"pass","Package":"m/q (vm)","Test":"TestB","Elapsed":71.2}`,
			want: "long     71s  q (vm) TestB\nlong     10s  p TestA\n4 passed, 0 failed, 0 skipped\n",
			ok:   true,
		},
		{
			name: "how a check's output ended is said again at the end",
			in: `{"Action":"output","Package":"checks","Test":"lint","Output":"a.go:1: odd\n"}
{"Action":"fail","Package":"checks","Test":"lint"}`,
			want: "FAIL  checks lint\na.go:1: odd\nfailed: checks lint\na.go:1: odd\nnothing ran\n0 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "a run that is cut short says which tests ran",
			in: `{"Action":"output","Package":"p (vm)","Test":"TestA","Output":"=== RUN TestA\n"}
{"Action":"output","Package":"p (vm)","Test":"TestA/part","Output":"=== RUN TestA/part\n"}
{"Action":"pass","Package":"p (vm)","Test":"TestB"}`,
			want: "didn't end: p (vm) TestA\n1 passed, 0 failed, 0 skipped\n",
			ok:   true,
		},
		{name: "nothing ran", want: "nothing ran\n0 passed, 0 failed, 0 skipped\n"},
		{
			name: "what isn't an event is passed on",
			in:   "warning: odd\n" + `{"Action":"pass","Package":"p","Test":"TestA"}`,
			want: "warning: odd\n1 passed, 0 failed, 0 skipped\n",
			ok:   true,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			r := newReport(&out)
			if err := r.read(strings.NewReader(tt.in)); err != nil {
				t.Fatal(err)
			}
			if ok := r.finish(tt.failSkipped); ok != tt.ok {
				t.Errorf("ok: got %t, want %t", ok, tt.ok)
			}
			if d := cmp.Diff(tt.want, out.String()); d != "" {
				t.Errorf("output (-want +got):\n%s", d)
			}
		})
	}
}
