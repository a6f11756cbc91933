{{- define "slotline.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "slotline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "slotline.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "slotline.selector" -}}
app.kubernetes.io/name: {{ include "slotline.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: control-plane
{{- end -}}

{{- define "slotline.labels" -}}
{{ include "slotline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "slotline.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "slotline.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "slotline.rayCluster" -}}
{{- printf "%s-ray" (include "slotline.fullname" .) -}}
{{- end -}}

{{- define "slotline.rayAddress" -}}
{{- if .Values.ray.cluster.create -}}
{{- printf "http://%s-head-svc.%s.svc:8265" (include "slotline.rayCluster" .) .Release.Namespace -}}
{{- else -}}
{{- required "set ray.address to the dashboard of a Ray cluster (http://head:8265), or ray.cluster.create to true" .Values.ray.address -}}
{{- end -}}
{{- end -}}

{{- define "slotline.url" -}}
{{- default (printf "http://%s.%s.svc:%v" (include "slotline.fullname" .) .Release.Namespace .Values.service.port) .Values.publicUrl -}}
{{- end -}}

{{/* A value as an environment variable: Helm reads every number as a float and would print 33554432 as 3.3554432e+07. */}}
{{- define "slotline.text" -}}
{{- if and (kindIs "float64" .) (eq (toString .) (toString (floor .))) -}}{{ printf "%.0f" . }}
{{- else -}}{{ toString . }}
{{- end -}}
{{- end -}}
