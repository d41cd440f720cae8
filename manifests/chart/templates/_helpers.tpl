{{- define "extproc.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "extproc.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "extproc.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "extproc.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "extproc.selectorLabels" -}}
app.kubernetes.io/name: {{ include "extproc.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "extproc.labels" -}}
{{ include "extproc.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "extproc.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "extproc.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed where none is created" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "extproc.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* Labels as a selector in words: a=b,c=d */ -}}
{{- define "extproc.selector" -}}
{{- $words := list -}}
{{- range $key, $value := .Values.pool.selector -}}
{{- $words = append $words (printf "%s=%s" $key $value) -}}
{{- end -}}
{{- join "," $words -}}
{{- end -}}

{{- /* The InferencePool's name; empty where pods are selected by label. */ -}}
{{- define "extproc.pool" -}}
{{- if and .Values.pool.selector (or .Values.pool.name .Values.pool.create.enabled) -}}
{{- fail "pool: give a name or a selector, not both" -}}
{{- end -}}
{{- if not .Values.pool.selector -}}
{{- default .Release.Name .Values.pool.name -}}
{{- end -}}
{{- end -}}
