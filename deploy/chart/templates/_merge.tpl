{{/*
Merges a pod template of the values over the chart's own, as Kubernetes merges a patch: maps by name, lists by the key of their
items (containers, volumes, env by name, volumeMounts by mountPath, ports by containerPort, ...), other lists as a whole. envFrom
and tolerations are added to. A volume replaces the one of its name. null takes a field away.
Takes (base, over, field), field being the name under which both stand; returns JSON, as {"merged": ...}.
*/}}
{{- define "slotline.merge" -}}
{{- $keys := dict "containers" "name" "initContainers" "name" "volumes" "name" "env" "name" "imagePullSecrets" "name" "volumeMounts" "mountPath" "volumeDevices" "devicePath" "ports" "containerPort" "hostAliases" "ip" "topologySpreadConstraints" "topologyKey" -}}
{{- $merged := .over -}}
{{- if and (kindIs "map" .base) (kindIs "map" .over) -}}
{{- $merged = deepCopy .base -}}
{{- range $name, $value := .over -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $merged $name -}}
{{- else if hasKey $merged $name -}}
{{- $_ := set $merged $name (include "slotline.merge" (dict "base" (get $merged $name) "over" $value "field" $name) | fromJson).merged -}}
{{- else -}}
{{- $_ := set $merged $name $value -}}
{{- end -}}
{{- end -}}
{{- else if and (kindIs "slice" .base) (kindIs "slice" .over) -}}
{{- if has .field (list "envFrom" "tolerations") -}}
{{- $merged = concat .base .over -}}
{{- else if hasKey $keys .field -}}
{{- $key := get $keys .field -}}
{{- $field := .field -}}
{{- $left := .over -}}
{{- $merged = list -}}
{{- range $item := .base -}}
{{- $result := $item -}}
{{- $rest := list -}}
{{- range $other := $left -}}
{{- if ne (toString (get $other $key)) (toString (get $item $key)) -}}
{{- $rest = append $rest $other -}}
{{- else if eq $field "volumes" -}}
{{- $result = $other -}}
{{- else -}}
{{- $result = (include "slotline.merge" (dict "base" $item "over" $other "field" "") | fromJson).merged -}}
{{- end -}}
{{- end -}}
{{- $left = $rest -}}
{{- $merged = append $merged $result -}}
{{- end -}}
{{- $merged = concat $merged $left -}}
{{- end -}}
{{- end -}}
{{- dict "merged" $merged | toJson -}}
{{- end -}}

{{/* The pod template `base` (YAML) with each of `templates` merged over it, in order. */}}
{{- define "slotline.podTemplate" -}}
{{- $pod := fromYaml .base -}}
{{- range .templates -}}
{{- with . -}}
{{- $pod = (include "slotline.merge" (dict "base" $pod "over" . "field" "") | fromJson).merged -}}
{{- end -}}
{{- end -}}
{{- toYaml $pod -}}
{{- end -}}

{{/* Fields that a template replaces: refuses those that are left, with where each goes. (where, values, container) */}}
{{- define "slotline.retired" -}}
{{- $inContainer := printf "template.spec.containers, in an item {name: %s, ...}" .container -}}
{{- $moved := dict "podLabels" "template.metadata.labels" "podAnnotations" "template.metadata.annotations" "podSecurityContext" "template.spec.securityContext" "securityContext" $inContainer "volumeMounts" $inContainer -}}
{{- range list "volumes" "serviceAccountName" "nodeSelector" "tolerations" "imagePullSecrets" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" "schedulerName" "initContainers" "terminationGracePeriodSeconds" -}}
{{- $_ := set $moved . (printf "template.spec.%s" .) -}}
{{- end -}}
{{- if ne .container "control-plane" -}}{{- $_ := set $moved "envFrom" $inContainer -}}{{- end -}}
{{- range $name := keys $moved | sortAlpha -}}
{{- if and (hasKey $.values $name) (not (and (eq $name "imagePullSecrets") (eq $.container "control-plane"))) -}}
{{- fail (printf "%s: %s has gone: write it in %s" $.where $name (get $moved $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
