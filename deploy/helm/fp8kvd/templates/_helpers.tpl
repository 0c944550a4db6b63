{{- define "fp8kvd.name" -}}
{{- if contains "fp8kvd" .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-fp8kvd" .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "fp8kvd.selector" -}}
app.kubernetes.io/name: fp8kvd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "fp8kvd.labels" -}}
{{ include "fp8kvd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "fp8kvd.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "fp8kvd.name" .) -}}
{{- end -}}

{{/* Drain and snapshot must end before SIGKILL: 5 s are left for the last writes and for the exit. */}}
{{- define "fp8kvd.drainMs" -}}
{{- $saving := ternary (int .Values.snapshot.seconds) 0 .Values.snapshot.enabled -}}
{{- $left := sub (int .Values.terminationGracePeriodSeconds) (add (int .Values.preStopSeconds) $saving 5) -}}
{{- if lt $left 1 -}}
{{- fail "terminationGracePeriodSeconds must exceed preStopSeconds and snapshot.seconds by more than 5: the drain has the rest" -}}
{{- end -}}
{{- mul $left 1000 -}}
{{- end -}}
