package bugreport

import (
	"bytes"
	"regexp"
)

// secrets match credentials in text. A report has nothing that reads them from where they are kept; these catch what
// got into a log line, an error or a URL. Each pattern needs one of its words to be there, which is quick to see.
var secrets = []struct {
	words   []string
	pattern *regexp.Regexp
	instead string
}{
	{[]string{"PRIVATE KEY"}, regexp.MustCompile(`-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?`), "[secret]"},
	{[]string{"eyJ"}, regexp.MustCompile(`eyJ[A-Za-z0-9_-]{6,}(?:\.[A-Za-z0-9_-]*){0,2}`), "[secret]"}, // a JSON Web Token (RFC 7519)
	{[]string{"Bearer", "bearer", "BEARER", "Basic", "basic"}, regexp.MustCompile(`(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}`), "$1 [secret]"},
	{[]string{"://"}, regexp.MustCompile(`(://)[^/\s:@"]+:[^/\s@"]+@`), "${1}[secret]@"},
	// Fields of a kubeconfig and their like, in YAML, JSON and key=value.
	{
		[]string{"token", "Token", "TOKEN", "passw", "Passw", "PASSW", "-data", "secret", "Secret", "SECRET"},
		regexp.MustCompile(`(?i)((?:token|password|passwd|client-key-data|client-certificate-data|certificate-authority-data|secret)\\?"?\s*[:=]\s*\\?"?)[^\s"\\,}]{3,}`), "${1}[secret]",
	},
}

// WithoutSecrets replaces what looks like a credential.
func WithoutSecrets(content []byte) []byte {
	for _, s := range secrets {
		for _, w := range s.words {
			if bytes.Contains(content, []byte(w)) {
				content = s.pattern.ReplaceAll(content, []byte(s.instead))
				break
			}
		}
	}
	return content
}
