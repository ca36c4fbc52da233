{{/* What deploy/'s kustomization does to every object: the label, and the namespace of what has one. */}}
{{- define "kproxy.object" }}
{{- $labels := .object.metadata.labels | default dict }}
{{- $_ := set .object.metadata "labels" (set $labels "app.kubernetes.io/name" "kproxy") }}
{{- if .object.metadata.namespace }}
  {{- $_ := set .object.metadata "namespace" .release.Namespace }}
{{- end }}
{{- range .object.subjects }}
  {{- $_ := set . "namespace" $.release.Namespace }}
{{- end }}
---
{{ toYaml .object }}
{{- end }}

{{/* The image by its digest, else by its tag. */}}
{{- define "kproxy.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}
