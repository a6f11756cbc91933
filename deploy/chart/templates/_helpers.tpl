{{- define "slotline.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 45 characters: KubeRay shortens what it makes of a RayCluster's name beyond 50, and refuses one beyond 53. */}}
{{- define "slotline.fullname" -}}
{{- $name := include "slotline.name" . -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- $full = regexReplaceAll "[-.]+$" ($full | trunc 45) "" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) -}}
{{- fail (printf "%q cannot name a Service: it must begin with a letter and hold letters, digits and dashes; set fullnameOverride" $full) -}}
{{- end -}}
{{- $full -}}
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
{{- printf "http://%s-head-svc.%s.svc:%s" (include "slotline.rayCluster" .) .Release.Namespace (include "slotline.rayPort" (dict "group" .Values.ray.cluster.head "name" "dashboard-port" "default" 8265)) -}}
{{- else -}}
{{- required "set ray.address to the dashboard of a Ray cluster (http://head:8265), or ray.cluster.create to true" .Values.ray.address -}}
{{- end -}}
{{- end -}}

{{/* Whether there is a cluster named default: not where clusters have names and every queue belongs to one of them. */}}
{{- define "slotline.hasDefaultCluster" -}}
{{- $found := or .Values.ray.address .Values.ray.cluster.create (not .Values.ray.clusters) (not .Values.queues) -}}
{{- range $queue := .Values.queues -}}
{{- if not (kindIs "map" $queue) -}}{{- $found = true -}}
{{- else if eq (default "default" $queue.cluster) "default" -}}{{- $found = true -}}
{{- end -}}
{{- end -}}
{{- if $found -}}true{{- end -}}
{{- end -}}

{{/* The variable with the token of a named cluster. */}}
{{- define "slotline.tokenVariable" -}}
{{- printf "RAY_AUTH_TOKEN_%s" (regexReplaceAll "[^A-Z0-9]" (upper .) "_") -}}
{{- end -}}

{{/* SLOTLINE_CLUSTERS: no token stands in it, only the names of the variables that do. */}}
{{- define "slotline.clusters" -}}
{{- $all := dict -}}
{{- $variables := dict -}}
{{- range $name, $one := .Values.ray.clusters -}}
{{- $entry := dict "address" $one.address -}}
{{- if and $one.tokenSecret $one.tokenSecret.name -}}
{{- $variable := include "slotline.tokenVariable" $name -}}
{{- if hasKey $variables $variable -}}
{{- fail (printf "ray.clusters: %s and %s would share the variable %s: give one another name" (get $variables $variable) $name $variable) -}}
{{- end -}}
{{- $_ := set $variables $variable $name -}}
{{- $_ := set $entry "token_variable" $variable -}}
{{- end -}}
{{- range $value, $setting := dict "driverUrl" "driver_url" "driverRayAddress" "driver_ray_address" "driverPython" "driver_python" "workersPerGpu" "workers_per_gpu" -}}
{{- if hasKey $one $value -}}{{- $_ := set $entry $setting (get $one $value) -}}{{- end -}}
{{- end -}}
{{- $_ := set $all $name $entry -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{- define "slotline.queues" -}}
{{- if hasKey .Values.settings "SLOTLINE_QUEUES" -}}
{{- fail "queues and settings.SLOTLINE_QUEUES are both given: say all queues in queues" -}}
{{- end -}}
{{- range $name, $queue := .Values.queues -}}
{{- if kindIs "map" $queue -}}
{{- $cluster := default "default" $queue.cluster -}}
{{- if and (ne $cluster "default") (not (hasKey $.Values.ray.clusters $cluster)) -}}
{{- fail (printf "queues: %s belongs to the cluster %q, which ray.clusters does not name: use one of default, %s" $name $cluster (keys $.Values.ray.clusters | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson .Values.queues -}}
{{- end -}}

{{/* The Service: what everything inside the cluster calls, whatever people call. */}}
{{- define "slotline.serviceUrl" -}}
{{- printf "http://%s.%s.svc:%v" (include "slotline.fullname" .) .Release.Namespace .Values.service.port -}}
{{- end -}}

{{- define "slotline.url" -}}
{{- if .Values.publicUrl -}}
{{- .Values.publicUrl -}}
{{- else if .Values.ingress.enabled -}}
{{- printf "%s://%s" (ternary "https" "http" (ne .Values.ingress.tlsSecret "")) .Values.ingress.host -}}
{{- else if and .Values.httpRoute.enabled .Values.httpRoute.hostnames -}}
{{- printf "https://%s" (first .Values.httpRoute.hostnames) -}}
{{- else -}}
{{- include "slotline.serviceUrl" . -}}
{{- end -}}
{{- end -}}

{{- define "slotline.image" -}}
{{- include "slotline.registry" . -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{- define "slotline.rayImage" -}}
{{- include "slotline.registry" . -}}
{{- with .Values.ray.cluster.image -}}
{{- printf "%s:%s" .repository (default (printf "%s-cuda" $.Chart.AppVersion) .tag) -}}
{{- end -}}
{{- end -}}

{{- define "slotline.registry" -}}
{{- with .Values.imageRegistry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- end -}}

{{/* Whether the data directory is on a volume that outlives the pod. */}}
{{- define "slotline.persistent" -}}
{{- if and .Values.persistence.enabled (or (not .Values.database.urlSecret.name) .Values.persistence.existingClaim) -}}true{{- end -}}
{{- end -}}

{{/* A value as an environment variable: Helm reads every number as a float and would print 33554432 as 3.3554432e+07. */}}
{{- define "slotline.text" -}}
{{- if and (kindIs "float64" .) (eq (toString .) (toString (floor .))) -}}{{ printf "%.0f" . }}
{{- else -}}{{ toString . }}
{{- end -}}
{{- end -}}

{{/* The label by which kube-prometheus-stack finds its objects, and those of the values. (root, labels) */}}
{{- define "slotline.monitoringLabels" -}}
{{- $labels := deepCopy .labels -}}
{{- if .root.Values.monitoring.release -}}
{{- $labels = merge $labels (dict "release" .root.Values.monitoring.release) -}}
{{- end -}}
{{- with $labels }}
{{- toYaml . }}
{{- end -}}
{{- end -}}

{{/* An amount of memory as Kubernetes writes it (4Gi, 4096M, 4294967296) in whole MiB. */}}
{{- define "slotline.mebibytes" -}}
{{- $text := include "slotline.text" . -}}
{{- $units := dict "" 1 "k" 1e3 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 "m" 0.001 -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- printf "%.0f" (floor (divf (mulf (float64 $number) (get $units (trimPrefix $number $text))) 1048576.0)) -}}
{{- end -}}

{{/* Refuses planning processes that, beside 1 GiB for the server (SERVER_BYTES), do not fit into the container's memory. */}}
{{- define "slotline.planningFits" -}}
{{- with (default (dict) (default (dict) .Values.resources).limits).memory -}}
{{- $settings := $.Values.settings -}}
{{- $processes := add 1 (int (include "slotline.text" (default 1 (get $settings "SLOTLINE_PLAN_PROCESSES")))) -}}
{{- $each := 512 -}}
{{- with get $settings "SLOTLINE_PLAN_MEMORY_BYTES" -}}{{- $each = int (include "slotline.mebibytes" .) -}}{{- end -}}
{{- $needed := add 1024 (mul $processes $each) -}}
{{- if gt (int $needed) (int (include "slotline.mebibytes" .)) -}}
{{- fail (printf "resources.limits.memory is %v, and %d planning processes of %d MiB beside 1024 MiB of the server need %dMi: raise it, or lower settings.SLOTLINE_PLAN_PROCESSES or SLOTLINE_PLAN_MEMORY_BYTES" . (int $processes) (int $each) (int $needed)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
