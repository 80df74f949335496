{{/* Everything is named after the release; the longest suffix is "-lighthouse". */}}
{{- define "isthmus.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{- define "isthmus.labels" -}}
app.kubernetes.io/name: isthmus
app.kubernetes.io/instance: {{ include "isthmus.name" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: isthmus-{{ .Chart.Version }}
{{- end }}

{{/* What selects the Pods of one part of the release: (dict "root" $ "part" "worker") */}}
{{- define "isthmus.selector" -}}
app.kubernetes.io/instance: {{ include "isthmus.name" .root }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{/* What a worker gets, as YAML: what exalsius injects, or else the chart's own values. */}}
{{- define "isthmus.resources" -}}
{{- $injected := index .Values "_exalsius" | default dict -}}
{{- $own := .Values.resources -}}
{{- $each := dig "resources" "perReplica" dict $injected -}}
{{- $vendor := $each.gpuVendor | default $own.gpuVendor -}}
{{- $names := dict "NVIDIA" "nvidia.com/gpu" "AMD" "amd.com/gpu" "" "" -}}
workers: {{ dig "resources" "replicas" .Values.workers $injected | int }}
cpu: {{ $each.cpu | default $own.cpu | toString | quote }}
memory: {{ $each.memory | default $own.memory | toString | quote }}
storage: {{ $each.storage | default .Values.storage.size | toString | quote }}
gpuCount: {{ ternary $each.gpuCount $own.gpuCount (hasKey $each "gpuCount") | int }}
gpuVendor: {{ $vendor | quote }}
gpuResourceName: {{ $each.gpuResourceName | default $own.gpuResourceName | default (get $names $vendor) | quote }}
nodeSelector: {{ merge (dict) (dig "scheduling" "nodeSelector" dict $injected) .Values.nodeSelector | toJson }}
{{- end }}

{{- define "isthmus.image" -}}
{{- $vendor := (include "isthmus.resources" . | fromYaml).gpuVendor -}}
{{- $image := ternary .Values.image.amd .Values.image.default (eq $vendor "AMD") -}}
{{ $image.repository }}:{{ $image.tag }}{{ with $image.digest }}@{{ . }}{{ end }}
{{- end }}

{{/* The run's YAML as text: as it was given, or of the values. */}}
{{- define "isthmus.run" -}}
{{- if kindIs "string" .Values.run }}{{ .Values.run }}{{ else }}{{ toYaml .Values.run }}{{ end -}}
{{- end }}

{{/* How many ranks run.mesh gives a worker. */}}
{{- define "isthmus.ranks" -}}
{{- $mesh := (include "isthmus.run" . | fromYaml).mesh | default dict -}}
{{- if kindIs "map" $mesh -}}
{{- mul ($mesh.pp | default 1) ($mesh.shard | default 1) ($mesh.tp | default 1) -}}
{{- else }}{{ int $mesh }}{{ end -}}
{{- end }}

{{/* The Secret with the workers' environment; nothing where there is none. */}}
{{- define "isthmus.secret" -}}
{{- with .Values.secrets -}}
{{- if .existing }}{{ .existing }}
{{- else if or .runSecret .wandbApiKey .huggingFaceToken }}{{ include "isthmus.name" $ }}-environment{{ end -}}
{{- end -}}
{{- end }}

{{/* Pod and container as restricted as Pod Security Standards know. */}}
{{- define "isthmus.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "isthmus.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* A server beside the workers, with its Service: (dict "root" $ "part" "relay" "port" 29530 "args" list "values" ...) */}}
{{- define "isthmus.server" -}}
{{- $name := printf "%s-%s" (include "isthmus.name" .root) .part -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels: {{- include "isthmus.labels" .root | nindent 4 }}
spec:
  replicas: 1
  strategy: {type: Recreate}
  selector:
    matchLabels: {{- include "isthmus.selector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "isthmus.labels" .root | nindent 8 }}
        app.kubernetes.io/component: {{ .part }}
    spec:
      {{- include "isthmus.podSecurity" .root | nindent 6 }}
      {{- with .root.Values.image.pullSecrets }}
      imagePullSecrets:
        {{- range . }}
        - name: {{ . }}
        {{- end }}
      {{- end }}
      terminationGracePeriodSeconds: 10
      containers:
        - name: {{ .part }}
          image: {{ include "isthmus.image" .root }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          terminationMessagePolicy: FallbackToLogsOnError
          args: {{- toYaml .args | nindent 12 }}
          workingDir: /tmp
          env:
            - {name: HOME, value: /tmp}
            {{- if and (include "isthmus.secret" .root) (ne .part "lighthouse") }}
            - name: ISTHMUS_RUN_SECRET
              valueFrom:
                secretKeyRef: {name: {{ include "isthmus.secret" .root }}, key: ISTHMUS_RUN_SECRET, optional: true}
            {{- end }}
          ports:
            - {name: {{ .part }}, containerPort: {{ .port }}}
          startupProbe:
            {{- include "isthmus.serverProbe" . | nindent 12 }}
            periodSeconds: 2
            failureThreshold: 60
          livenessProbe:
            {{- include "isthmus.serverProbe" . | nindent 12 }}
            periodSeconds: 20
            timeoutSeconds: 5
            failureThreshold: 6
          readinessProbe:
            {{- include "isthmus.serverProbe" . | nindent 12 }}
          resources:
            requests: {cpu: 100m, memory: 512Mi}
            limits: {memory: 2Gi}
          securityContext: {{- include "isthmus.containerSecurity" .root | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            {{- if and .root.Values.keys.secret (ne .part "lighthouse") }}
            - {name: keys, mountPath: /etc/isthmus/keys, readOnly: true}
            {{- end }}
      volumes:
        - {name: tmp, emptyDir: {}}
        {{- if and .root.Values.keys.secret (ne .part "lighthouse") }}
        - name: keys
          secret:
            secretName: {{ .root.Values.keys.secret }}
            defaultMode: 0440
            items:
              - {key: {{ .part }}.key, path: {{ .part }}.key}
              - {key: trusted.txt, path: trusted.txt}
        {{- end }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels: {{- include "isthmus.labels" .root | nindent 4 }}
  {{- with .values.service.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: {{ .values.service.type }}
  {{- with .values.service.loadBalancerSourceRanges }}
  loadBalancerSourceRanges: {{- toYaml . | nindent 4 }}
  {{- end }}
  selector: {{- include "isthmus.selector" . | nindent 4 }}
  ports:
    - {name: {{ .part }}, port: {{ .port }}, targetPort: {{ .part }}}
{{- end }}

{{- define "isthmus.serverProbe" -}}
{{- if eq .part "lighthouse" -}}
httpGet: {path: /status, port: {{ .part }}}
{{- else -}}
tcpSocket: {port: {{ .part }}}
{{- end -}}
{{- end }}

{{/* Refuses, in one sentence, what no schema can: values that do not go together. */}}
{{- define "isthmus.check" -}}
{{- $run := include "isthmus.run" . | fromYaml -}}
{{- if hasKey $run "Error" }}{{ fail (printf "run is no YAML: %s" $run.Error) }}{{ end -}}
{{- if not $run.model }}{{ fail "run has no model: give the run's YAML, say by --set-file run=run.yaml" }}{{ end -}}
{{- $resources := include "isthmus.resources" . | fromYaml -}}
{{- $gpus := int $resources.gpuCount -}}
{{- if and $gpus (not $resources.gpuResourceName) -}}
{{- fail "resources.gpuVendor is missing: say NVIDIA or AMD, or name resources.gpuResourceName" -}}
{{- end -}}
{{- $ranks := include "isthmus.ranks" . | int -}}
{{- if and $gpus (ne $ranks $gpus) -}}
{{- fail (printf "resources.gpuCount is %d, but run.mesh has %d ranks, a GPU each: set mesh.shard to %d, say" $gpus $ranks $gpus) -}}
{{- end -}}
{{- $engine := include "isthmus.engine" . -}}
{{- if eq $engine "torchft" -}}
{{- if not (or .Values.lighthouse.enabled .Values.lighthouse.address) -}}
{{- fail "lighthouse.address is missing: enable the lighthouse in one site, and give its address in the others" -}}
{{- end -}}
{{- else if eq $engine "hivemind" -}}
{{- if not (or .Values.dht.enabled .Values.dht.peers) -}}
{{- fail "dht.peers is missing: enable the DHT's first peer in one site, and name it in the others" -}}
{{- end -}}
{{- else -}}
{{- fail (printf "run.outer.transport.type is %s: these workers come and go, over torchft or hivemind" $engine) -}}
{{- end -}}
{{- if and .Values.dht.enabled (not (and .Values.dht.peerId .Values.keys.secret)) -}}
{{- fail "dht.enabled needs dht.peerId, and keys.secret with its dht.key: isthmus dht --identity dht.key makes both" -}}
{{- end -}}
{{- if and .Values.relay.enabled (not (include "isthmus.secret" .)) (not .Values.keys.secret) -}}
{{- fail "relay.enabled needs secrets.runSecret or keys.secret: a relay serves those whom it trusts" -}}
{{- end -}}
{{- end }}

{{/* Whether workers meet over torchft or hivemind: what the run says, or torchft. */}}
{{- define "isthmus.engine" -}}
{{- $transport := dig "outer" "transport" dict (include "isthmus.run" . | fromYaml) -}}
{{- if kindIs "string" $transport }}{{ $transport }}{{ else }}{{ $transport.type | default "torchft" }}{{ end -}}
{{- end }}

{{/* The run's outer.transport with what is this release's own, as JSON. */}}
{{- define "isthmus.transport" -}}
{{- $host := printf "%s-%%s.%s.svc" (include "isthmus.name" .) .Release.Namespace -}}
{{- $own := dict "type" (include "isthmus.engine" .) "port" .Values.port -}}
{{- if eq $own.type "torchft" -}}
{{- $lighthouse := .Values.lighthouse.enabled | ternary (print (printf $host "lighthouse") ":29510") .Values.lighthouse.address -}}
{{- $_ := set $own "lighthouse" $lighthouse -}}
{{- else -}}
{{- $peers := .Values.dht.peers -}}
{{- if .Values.dht.enabled -}}
{{- $peers = prepend $peers (printf "/dns4/%s/tcp/29520/p2p/%s" (printf $host "dht") .Values.dht.peerId) -}}
{{- end -}}
{{- $_ := set $own "initial_peers" $peers -}}
{{- $_ := set $own "listen" (list (printf "/ip4/0.0.0.0/tcp/%s" (include "isthmus.lastPort" .))) -}}
{{- end -}}
{{- with .Values.relay.address }}{{ $_ := set $own "via" . }}{{ end -}}
{{- if .Values.keys.secret -}}
{{- $_ := set $own "identity" "/etc/isthmus/keys/worker-$(JOB_COMPLETION_INDEX).key" -}}
{{- $_ := set $own "trusted" "/etc/isthmus/keys/trusted.txt" -}}
{{- end -}}
{{- $transport := dig "outer" "transport" dict (include "isthmus.run" . | fromYaml) -}}
{{- merge $own (kindIs "map" $transport | ternary $transport dict) | toJson -}}
{{- end }}

{{/* The last of a worker's ports: one a rank, and over hivemind one more. */}}
{{- define "isthmus.lastPort" -}}
{{- $count := include "isthmus.ranks" . | int -}}
{{- if eq (include "isthmus.engine" .) "torchft" }}{{ $count = sub $count 1 }}{{ end -}}
{{- add .Values.port $count -}}
{{- end }}
