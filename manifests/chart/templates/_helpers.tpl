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
app.kubernetes.io/name: {{ include "extproc.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
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

{{- /* The InferencePool's name; empty where pods are selected by label, or all pools are served. */ -}}
{{- define "extproc.pool" -}}
{{- $named := or .Values.pool.name .Values.pool.create.enabled -}}
{{- $every := ne .Values.pool.every "none" -}}
{{- if or (and .Values.pool.selector $named) (and .Values.pool.selector $every) (and $every $named) -}}
{{- fail "pool: give one of name, selector and every" -}}
{{- end -}}
{{- if and .Values.pool.matchRules (not $every) -}}
{{- fail "pool.matchRules: they are for InferencePools of pool.every; set it, or remove them" -}}
{{- end -}}
{{- if and (ne .Values.pool.group "inference.networking.k8s.io") (or .Values.pool.selector $every) -}}
{{- fail (printf "pool.group: %s is for the InferencePool pool.name; remove it" .Values.pool.group) -}}
{{- end -}}
{{- if not (or .Values.pool.selector $every) -}}
{{- default .Release.Name .Values.pool.name -}}
{{- end -}}
{{- end -}}

{{- /* Kind of role: pools of other namespaces take rights in the whole cluster. */ -}}
{{- define "extproc.roleKind" -}}
{{- ternary "ClusterRole" "Role" (eq .Values.pool.every "cluster") -}}
{{- end -}}

{{- /* Objects of the whole cluster share one namespace with those of other releases. */ -}}
{{- define "extproc.roleName" -}}
{{- if eq .Values.pool.every "cluster" -}}
{{- printf "%s-%s" .Release.Namespace (include "extproc.fullname" .) -}}
{{- else -}}
{{- include "extproc.fullname" . -}}
{{- end -}}
{{- end -}}

{{- /* `true` if replicas exchange their requests directly. */ -}}
{{- define "extproc.exchangesRequests" -}}
{{- $several := or .Values.autoscaling.enabled (gt (int .Values.replicaCount) 1) -}}
{{- if and .Values.peerSync.enabled $several (not (dig "peer_sync" "url" "" .Values.config)) -}}
true
{{- end -}}
{{- end -}}

{{- /* `true` if replicas connect to each other: for that, or to count for engineAutoscaling. */ -}}
{{- define "extproc.hasPeers" -}}
{{- if or (include "extproc.exchangesRequests" .) .Values.engineAutoscaling.enabled -}}
true
{{- end -}}
{{- end -}}

{{- /* The Service by which replicas find each other. */ -}}
{{- define "extproc.peers" -}}
{{- printf "%s-peers" (include "extproc.fullname" . | trunc 57 | trimSuffix "-") -}}
{{- end -}}

{{- /* The account, and the Secret with the token, by which Prometheus reads /metrics. */ -}}
{{- define "extproc.metricsReader" -}}
{{- printf "%s-metrics-reader" (include "extproc.fullname" . | trunc 48 | trimSuffix "-") -}}
{{- end -}}

{{- /* The ConfigMap in which they keep what they learned. */ -}}
{{- define "extproc.scalingState" -}}
{{- $own := dig "autoscaling" "state" "" .Values.config -}}
{{- default (printf "%s-autoscaling" (include "extproc.fullname" .)) $own -}}
{{- end -}}

{{- /* Ports of config.kv_events.bind, of every rank: 5557,5558; empty where engines are connected to. */ -}}
{{- define "extproc.kvEventPorts" -}}
{{- $events := default dict .Values.config.kv_events -}}
{{- if and $events.enabled $events.bind -}}
{{- $several := or .Values.autoscaling.enabled (gt (int .Values.replicaCount) 1) -}}
{{- if and $several (not .Values.leaderElection.enabled) -}}
{{- fail "config.kv_events.bind: an engine connects to one replica: enable leaderElection, or set replicaCount to 1 without autoscaling, or remove bind" -}}
{{- end -}}
{{- $first := regexFind "[0-9]+$" $events.bind | int -}}
{{- $ports := list -}}
{{- range until (int (default 1 $events.ranks)) -}}
{{- $ports = append $ports (add $first .) -}}
{{- end -}}
{{- join "," $ports -}}
{{- end -}}
{{- end -}}

{{- /* Fails on fields of `config` that the rest of the chart fixes: flags and ports would contradict them. */ -}}
{{- define "extproc.refuseFixedFields" -}}
{{- $fixed := dict
  "server.grpc_port" "the chart fixes port 9002; remove it"
  "server.grpc_health_port" "the chart fixes port 9003; remove it"
  "server.metrics_port" "the chart fixes port 9090; remove it"
  "server.secure_serving" "set tls.enabled in its place"
  "server.drain_timeout_s" "set drainTimeoutSeconds in its place"
  "server.metrics_endpoint_auth" "set monitoring.auth.enabled in its place"
  "cluster.leader_election" "set leaderElection.enabled in its place"
  "xds.enabled" "set xds.enabled of the chart in its place"
  "xds.port" "set xds.port of the chart in its place"
  "cluster.discover_pools" "set pool.every in its place"
  "cluster.match_rules" "set pool.matchRules in its place"
  "autoscaling.keda" "the chart has no port for KEDA; remove it, or use the component engine-autoscaling-keda of kustomize"
-}}
{{- if .Values.adminToken.secretName -}}
{{- $_ := set $fixed "server.admin_token_file" "adminToken.secretName sets the file; remove one of them" -}}
{{- end -}}
{{- if and .Values.tls.enabled .Values.tls.secretName -}}
{{- $_ := set $fixed "server.cert_path" "tls.secretName sets the path; remove one of them" -}}
{{- end -}}
{{- if eq .Values.pool.every "none" -}}
{{- $_ := set $fixed "pool.kubernetes.namespace" "the chart sets the namespace of the release; remove it" -}}
{{- $_ := set $fixed "pool.kubernetes.inference_pool" "set pool.name in its place" -}}
{{- if .Values.pool.selector -}}
{{- $_ := set $fixed "pool.kubernetes.selector" "set pool.selector in its place" -}}
{{- $_ := set $fixed "pool.kubernetes.ports" "set pool.targetPorts in its place" -}}
{{- range list "pool.endpoints" "pool.endpoints_file" "pool.kubernetes.service" "pools" -}}
{{- $_ := set $fixed . "pool.selector selects the engines; remove one of them" -}}
{{- end -}}
{{- else -}}
{{- $_ := set $fixed "pool.name" "set pool.name of the chart in its place" -}}
{{- $_ := set $fixed "pool.kubernetes.group" "set pool.group in its place" -}}
{{- end -}}
{{- end -}}
{{- range $path, $fix := $fixed -}}
{{- $names := splitList "." $path -}}
{{- $section := $.Values.config -}}
{{- range initial $names -}}
{{- $section = get (ternary $section dict (kindIs "map" $section)) . -}}
{{- end -}}
{{- if and (kindIs "map" $section) (hasKey $section (last $names)) -}}
{{- fail (printf "config.%s: %s" $path $fix) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Fails on values that contradict each other: the API server would refuse objects, or a pod end at once. */ -}}
{{- define "extproc.refuseContradictions" -}}
{{- $users := dict "9002" "ext_proc" "9003" "health checks" "9090" "metrics" -}}
{{- if .Values.xds.enabled -}}
{{- $port := toString .Values.xds.port -}}
{{- with get $users $port -}}
{{- fail (printf "xds.port: %s is the port of %s; choose another" $port .) -}}
{{- end -}}
{{- $_ := set $users $port "xds.port" -}}
{{- end -}}
{{- range compact (splitList "," (include "extproc.kvEventPorts" .)) -}}
{{- $port := . -}}
{{- with get $users $port -}}
{{- fail (printf "config.kv_events.bind: %s is the port of %s; choose another" $port .) -}}
{{- end -}}
{{- end -}}
{{- with .Values.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas: %d is more than maxReplicas, %d" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- $own := include "extproc.labels" . | fromYaml -}}
{{- range $key, $_ := .Values.podLabels -}}
{{- if hasKey $own $key -}}
{{- fail (printf "podLabels: the chart sets %s; remove it" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
